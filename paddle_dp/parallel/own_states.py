"""An optimizer's states on ranks that update weights of their own: each rank's, by name, and in the order of parameters
that means over ranks need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import paddle

from paddle_dp.mesh import Mesh

_COUNTS = "_pow_acc"  # a decay to the power of the updates so far: one number for each parameter

States = list[paddle.Tensor | None]
"""Of one kind: one for each trained parameter, of its shape; None where this rank has none yet."""


class OwnStates:
    """The states that `optimizer` keeps of these parameters (name, parameter)."""

    def __init__(self, optimizer: Any, named: Sequence[tuple[str, paddle.Tensor]], mesh: Mesh):
        self._optimizer, self._named, self._mesh = optimizer, list(named), mesh

    def by_kind(self) -> Iterator[States]:
        """The states that have their parameters' shapes. Collective: the same kinds on all ranks."""
        held = self._optimizer._accumulators
        mine = [kind for kind, of_kind in held.items() if of_kind and not kind.endswith(_COUNTS)]
        for kind in sorted(set().union(*self._mesh.gather(mine))):
            of_kind = held.get(kind, {})
            yield [of_kind.get(parameter.name) for _, parameter in self._named]

    def named(self) -> dict[str, paddle.Tensor]:
        """All of them on this rank, «body.0.weight/moment1»."""
        held = self._optimizer._accumulators
        return {
            f"{name}/{kind}": held[kind][parameter.name]
            for kind in sorted(held)
            for name, parameter in self._named
            if parameter.name in held[kind]
        }

    def average_counts(self) -> None:
        """Takes the means of the decays' powers: ranks that had no sample in a step have made fewer updates.
        Collective."""
        counts = {name: state for name, state in self.named().items() if name.endswith(_COUNTS)}
        rows = self._mesh.gather({name: state.item() for name, state in counts.items()})
        for name, state in counts.items():
            found = [row[name] for row in rows if name in row]
            state.fill_(sum(found) / len(found))


def write(tensors: States, values: States) -> None:
    """Writes values into tensors, where both are there."""
    for tensor, value in zip(tensors, values, strict=True):
        if tensor is not None and value is not None:
            tensor.copy_(value.astype(tensor.dtype), False)
