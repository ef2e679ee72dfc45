"""Lends weights to a model that has none yet, block by block, for trial forwards before it is placed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import nn

from paddle_dp.core.blocks import elements_of
from paddle_dp.core.precision.amp import cast, default_dtype, read_by
from paddle_dp.core.trial import trial
from paddle_dp.model.initial_weights import draw, initial_weights
from paddle_dp.structure import call


@contextmanager
def trial_weights(model: nn.Layer) -> Iterator[None]:
    """Within the block, the weights of each of the model's blocks have values while that block runs: some of their
    distribution, the same in each forward. Weights outside the blocks have values throughout.

    Does nothing for a model that has its initial values.
    """
    initial = initial_weights(model)
    if initial is None:
        yield
        return
    blocks = list({id(block): block for _, block in elements_of(model)}.values())
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    materialized: dict[int, list[paddle.Tensor]] = defaultdict(list)
    hooks: list[Any] = []

    def before(block: nn.Layer, inputs: Any) -> None:
        materialized[id(block)] += [p for p in block.parameters() if initial.materialize(p)]

    def after(block: nn.Layer, inputs: Any, outputs: Any) -> None:
        for parameter in materialized.pop(id(block), ()):
            parameter._clear_data()

    outside = [p for p in model.parameters() if id(p) not in inside and initial.materialize(p)]
    for block in blocks:
        hooks.append(block.register_forward_pre_hook(before))
        # Before all other hooks: some of them read weights.
        block._forward_pre_hooks.move_to_end(hooks[-1]._hook_id, last=False)
        hooks.append(block.register_forward_post_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in (*outside, *(p for parameters in materialized.values() for p in parameters)):
            parameter._clear_data()


def is_lendable(model: nn.Layer, samples: Callable[[], Any] | None) -> bool:
    """False if a model's forward reads a block's weights outside that block's forward, where `trial_weights` provides
    no values: such a model is whole on every rank until it is placed."""
    if initial_weights(model) is None or samples is None:
        return True
    try:
        dtype = read_by(model)
        with trial_weights(model), trial(model), default_dtype(dtype):
            call(model, cast(samples(), dtype), model.forward)
    except Exception:  # noqa: BLE001 - an error with another cause is raised again later
        return False
    return True


def check_lendable(model: nn.Layer, samples: Callable[[], Any] | None, lendable: bool | None = None) -> None:
    """Gives a model all its initial values if they cannot be lent to it; `lendable`: a trial's result."""
    if not (is_lendable(model, samples) if lendable is None else lendable):
        draw(model)
