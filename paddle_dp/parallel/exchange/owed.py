"""What compressed gradients still owe to the updates, in a checkpoint: each rank's errors, and PowerSGD's factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import paddle

from paddle_dp.parallel.beside import SavedBeside
from paddle_dp.parallel.exchange.error_memory import ErrorMemory, wide

Tensors = dict[str, paddle.Tensor]


def errors_of(memory: ErrorMemory, names: Sequence[str]) -> Tensors:
    """This rank's errors; `names` are those of the memory's places."""
    return {f"error/{name}": memory.saved(place) for place, name in enumerate(names)}


def factors_of(factors: Mapping[int, paddle.Tensor], names: Sequence[str]) -> Tensors:
    """The factors Q, the same on every rank."""
    return {_factor(names[place], factor): factor for place, factor in factors.items()}


def restore_errors(memory: ErrorMemory, names: Sequence[str], ranks: int, saved: SavedBeside) -> None:
    """On as many ranks as saved them each gets its own; on others, all that is owed is shared equally: what counts is
    its sum."""
    for place, name in enumerate(names):
        parameter, key = memory.parameters[place], f"error/{name}"
        error = paddle.zeros(parameter.shape, wide(parameter))
        if key in saved.own:
            saved.own_into(key, error)
        elif saved.sum_into(key, error):
            error = error / ranks
        else:
            continue
        memory.restore(place, error)


def restore_factors(factors: dict[int, paddle.Tensor], names: Sequence[str], saved: SavedBeside) -> None:
    """Of as many columns as now; others stay as they were drawn."""
    for place, factor in factors.items():
        key = _factor(names[place], factor)
        if key in saved.shared:
            factors[place] = paddle.zeros_like(factor)
            saved.shared_into(key, factors[place])


def _factor(name: str, factor: paddle.Tensor) -> str:
    return f"factor{factor.shape[0]}/{name}"
