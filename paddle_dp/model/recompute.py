"""Recompute: backward computes activations again that forward does not keep; less memory, one more forward.

Fleet's `recompute` (reentrant) restores the random state, and the state of exact dropout, for the second forward:
dropout draws the same masks, and the gradients are bit-equal to a plain run's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute

from paddle_dp.core.batch_norm import statistics
from paddle_dp.core.blocks import blocks_of, outside, settle, used_layer
from paddle_dp.core.buffers import copies
from paddle_dp.core.wrapping import Method, wrap
from paddle_dp.errors import UsageError
from paddle_dp.part.annotation import attention_methods_of
from paddle_dp.units import Recompute


def recomputed(model: nn.Layer, how: Recompute) -> nn.Layer:
    """The model, changed in place: its blocks, or only its attention, keep only their inputs for backward.

    `attention` is selective recomputation (Korthikanti et al., arXiv:2205.05198, section 5): the tensors between the
    projections are large, [n, heads, t, t], and cheap to compute again. The last block of a whole model is never
    recomputed: backward starts with it, so it would save nothing. A layer that is several blocks is recomputed in each
    if in any. Raises UsageError for a model that lacks `blocks` or `attention_methods`.
    """
    check_recompute(model, how)
    if how.attention:
        for layer in model.sublayers(include_self=True):
            for name in attention_methods_of(layer):
                wrap(layer, name, "recompute", _with_recompute)
    if not how.blocks:
        return model
    blocks = settle(model)
    end = None if outside(model, blocks) else -1
    chosen = {id(layer): layer for layer in map(used_layer, blocks[how.blocks - 1 : end : how.blocks])}
    for block in chosen.values():
        wrap(block, "forward", "recompute", partial(_with_recompute, block=block))
    return model


def check_recompute(model: nn.Layer, how: Recompute) -> None:
    """Raises UsageError for a model without `blocks` or `attention_methods`, if `how` needs them."""
    if how.blocks and not blocks_of(model):
        raise UsageError(
            f"strategy.recompute: {type(model).__name__} has no ordered `blocks` to recompute. Name them "
            "(docs/add-a-part.md), or set strategy.recompute=none."
        )
    if how.attention and not any(attention_methods_of(layer) for layer in model.sublayers(include_self=True)):
        raise UsageError(
            f"strategy.recompute: no layer of {type(model).__name__} names its attention in `attention_methods` "
            "(docs/add-a-part.md). Name it, or set strategy.recompute=full or none."
        )


def _with_recompute(function: Method, block: nn.Layer | None = None) -> Method:
    """`function`, recomputed in backward; called directly if there is no backward, or no input requires a gradient.

    Both passes of a `block` start with the same buffers; afterwards the buffers are those after one forward. For inputs
    that require no gradient (the tokens of an embedding) fleet's recompute returns outputs that require none either, so
    the layer would silently not be trained. It also ignores tensors in nestings, so it gets and returns flat tuples.
    Raises UsageError for inputs in which tensors cannot be found.
    """

    def forward(*inputs: Any, **named: Any) -> Any:
        input_tensors: list[paddle.Tensor] = []
        nesting = _replaced((inputs, named), paddle.Tensor, lambda x: _Hole(_append(input_tensors, x)))
        if not paddle.is_grad_enabled() or all(x.stop_gradient for x in input_tensors):
            return function(*inputs, **named)
        output_nesting: list[Any] = []  # the outputs' nesting without the tensors, so that they can be freed
        state = None if block is None else _State(block)

        def flat(*tensors: paddle.Tensor) -> tuple[paddle.Tensor, ...]:
            positional, by_name = _replaced(nesting, _Hole, lambda hole: tensors[hole.number])
            outputs: list[paddle.Tensor] = []

            def to_hole(x: paddle.Tensor) -> _Hole:
                same = next(
                    (n for n, tensor in enumerate(tensors) if tensor is x), None
                )  # an input returned unchanged
                return _Hole(_append(outputs, x)) if same is None else _Hole(same, is_input=True)

            with nullcontext() if state is None else state.around_pass():
                output_nesting[:] = [_replaced(function(*positional, **by_name), paddle.Tensor, to_hole)]
            return tuple(outputs)

        outputs = recompute(flat, *input_tensors)
        return _replaced(
            output_nesting[0], _Hole, lambda hole: (input_tensors if hole.is_input else outputs)[hole.number]
        )

    return forward


@dataclass(frozen=True)
class _Hole:
    """Stands for a tensor in a nesting, by its number."""

    number: int
    is_input: bool = False


def _append(values: list[Any], value: Any) -> int:
    values.append(value)
    return len(values) - 1


def _replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """A nesting of dicts, lists and tuples with its leaves of a kind replaced; other leaves stay. Raises UsageError for
    an object that holds tensors in another way."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, dict):
        replaced = copy(value)  # of the same class
        replaced.update({key: _replaced(item, kind, by) for key, item in value.items()})
        return replaced
    if isinstance(value, (tuple, list)):
        elements = [_replaced(item, kind, by) for item in value]
        is_plain = type(value) in (tuple, list)
        return type(value)(elements) if is_plain else type(value)(*elements)  # a namedtuple
    if any(isinstance(item, paddle.Tensor) for item in getattr(value, "__dict__", {}).values()):
        raise UsageError(
            f"strategy.recompute: a block takes or returns a {type(value).__name__} with tensors, which recompute does "
            "not see: return tensors, dicts or tuples of them, or set strategy.recompute=none."
        )
    return value


class _State:
    """The buffers and running statistics of a block. The second pass of its forward starts with copies of the first
    pass's initial values, and the first pass's results stay.

    fleet's recompute runs the first pass without gradients, and the second, within backward, with them: by then another
    micro-batch may have passed through the block.
    """

    def __init__(self, block: nn.Layer):
        running = {id(tensor) for tensor in statistics(block).values()}
        self._tables: list[tuple[dict[str, Any], list[str]]] = []
        for layer in block.sublayers(include_self=True):
            self._tables.append((layer._buffers, list(layer._buffers)))
            statistic_names = [name for name, tensor in layer._parameters.items() if id(tensor) in running]
            self._tables.append((layer._parameters, statistic_names))
        self._before: list[paddle.Tensor | None] = []

    @contextmanager
    def around_pass(self) -> Iterator[None]:
        """Wraps either pass."""
        slots = [(table, name) for table, names in self._tables for name in names]
        if not paddle.is_grad_enabled():
            self._before = copies([table[name] for table, name in slots])
            yield
            return
        now = [table[name] for table, name in slots]
        try:
            for (table, name), value in zip(slots, self._before, strict=True):
                table[name] = value
            yield
        finally:
            for (table, name), value in zip(slots, now, strict=True):
                table[name] = value
            self._before = []
