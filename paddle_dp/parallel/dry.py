"""A model without memory for its weights, as numbers; and one rank's portion of it, built without other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle
from paddle import nn

from paddle_dp.mesh.bridge.absent import alone
from paddle_dp.parallel.tensor import Cutter
from paddle_dp.plan.portion import Weight

PARTLY: dict[str, tuple[str, ...]] = {"rows": ("weight",)}  # ways that leave some parameters whole


@contextmanager
def lazily() -> Iterator[None]:
    """Inside, models are built without memory for their weights; names and random numbers stay as they were."""
    kept = paddle.get_rng_state()
    try:
        with paddle.LazyGuard(), paddle.utils.unique_name.guard():
            yield
    finally:
        paddle.set_rng_state(kept)


def units(model: nn.Layer) -> list[nn.Layer]:
    """The model's ordered blocks, where they are all of it; else the model as one."""
    blocks = list(getattr(model, "blocks", ()))
    inside = all(name.startswith("blocks.") for name, _ in model.named_parameters())
    return blocks if blocks and inside else [model]


def outline(model: nn.Layer) -> list[list[Weight]]:
    """The weights of each unit as numbers, cut or not by the tables that the model's layers carry."""
    cut = {
        id(parameter)
        for parent in model.sublayers(include_self=True)
        for name, way in getattr(parent, "cuts", {}).items()
        for word, parameter in getattr(parent, name).named_parameters(include_sublayers=False)
        if word in PARTLY.get(way, (word,))
    }
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return [
        [Weight(name=names[id(p)], size=int(p.size), cut=id(p) in cut) for p in unit.parameters()]
        for unit in units(model)
    ]


def built(build: Callable[[], nn.Layer], numbers: Sequence[int], seat: int, seats: int) -> list[nn.Layer]:
    """These units of the model with their initial weights in memory, cut for one of `seats` on the tensor axis.

    One whole unit at a time is in memory, beside the cut ones: a model of any size, on the host that holds a portion.
    The weights are drawn as one process draws them, but not the same ones. Raises UsageError where nothing is cut.
    """
    with lazily():
        model = build()
    every = units(model)
    mine = [every[number] for number in numbers]
    here = {id(parameter) for unit in mine for parameter in unit.parameters()}
    with alone(seat, seats) as group:
        cutter = Cutter(group)
        for unit in every:
            if any(
                id(parameter) in here for parameter in unit.parameters()
            ):  # its own, or a weight that it shares
                _draw(unit.parameters())
                if seats > 1:
                    cutter.replace(unit)
    return mine


def _draw(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        if not parameter._is_initialized():
            parameter.initialize()
