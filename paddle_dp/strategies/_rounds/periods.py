"""The schedule of means under local SGD (`Periods`), and the local optimizer states of its ranks (`LocalStates`).

Checkpoints save local states by name; means over ranks read them in the order of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Any

import numpy as np
import paddle

from paddle_dp.mesh import Mesh

_COUNTS = "_pow_acc"  # a decay to the power of the updates so far: one number for each parameter

Tensors = list[paddle.Tensor | None]
"""One tensor for each trained parameter, of its shape; None if this rank has none yet."""


class LocalStates:
    """The states that `optimizer` keeps for the parameters in `named` (name, parameter)."""

    def __init__(self, optimizer: Any, named: Sequence[tuple[str, paddle.Tensor]], mesh: Mesh):
        self._optimizer, self._named, self._mesh = optimizer, list(named), mesh

    def by_kind(self) -> Iterator[Tensors]:
        """Yields, for each kind, the states with their parameters' shapes; the same ones on all ranks. Collective."""
        self.complete()
        accumulators = self._optimizer._accumulators
        for kind in sorted(
            kind
            for kind, states_of_kind in accumulators.items()
            if states_of_kind and not kind.endswith(_COUNTS)
        ):
            states_of_kind = [
                (accumulators[kind].get(parameter.name), parameter) for _, parameter in self._named
            ]
            yield [
                state if state is not None and _is_like(state, parameter) else None
                for state, parameter in states_of_kind
            ]

    def complete(self) -> None:
        """Creates initial states for parameters that have states on other ranks only, because no sample of this rank
        has used them. Else a mean, or rank 0's checkpoint, would lack them. Collective."""
        from paddle.base import framework

        accumulators = self._optimizer._accumulators.values()
        present = {
            name
            for name, p in self._named
            if any(p.name in states_of_kind for states_of_kind in accumulators)
        }
        lacking = set().union(*self._mesh.gather(sorted(present))) - present
        if new := [parameter for name, parameter in self._named if name in lacking]:
            self._optimizer._create_accumulators(framework.default_main_program().global_block(), new)

    def named(self) -> dict[str, paddle.Tensor]:
        """All states on this rank, by "parameter/kind" such as "body.0.weight/moment1"."""
        accumulators = self._optimizer._accumulators
        return {
            f"{name}/{kind}": accumulators[kind][parameter.name]
            for kind in sorted(accumulators)
            for name, parameter in self._named
            if parameter.name in accumulators[kind]
        }

    def counts(self) -> dict[str, paddle.Tensor]:
        """The powers of decays, and all other states without their parameter's shape (ASGD: the number of steps, and
        gradients of several), by name."""
        parameter_of = dict(self._named)
        return {
            name: state
            for name, state in self.named().items()
            if name.endswith(_COUNTS) or not _is_like(state, parameter_of[name.rpartition("/")[0]])
        }

    def average_counts(self, portion: float) -> None:
        """Averages `counts` with weight `portion` for this rank: ranks without a sample in a step have made fewer
        updates. Collective."""
        counts = self.counts()
        rows = self._mesh.gather([portion, {name: state.tolist() for name, state in counts.items()}])
        for name, state in counts.items():
            counts_by_weight = [(weight, row[name]) for weight, row in rows if name in row]
            if total := sum(weight for weight, _ in counts_by_weight):
                mean = sum(weight * np.array(count, "float64") for weight, count in counts_by_weight) / total
                is_whole = not state.is_floating_point()
                state.set_value((np.rint(mean) if is_whole else mean).astype(state.numpy().dtype))


def _is_like(state: paddle.Tensor, parameter: paddle.Tensor) -> bool:
    return list(state.shape) == list(parameter.shape) and state.is_floating_point()


def write(tensors: Tensors, values: Tensors) -> None:
    """Writes values into tensors, where neither is None."""
    for tensor, value in zip(tensors, values, strict=True):
        if tensor is not None and value is not None:
            tensor.copy_(value.astype(tensor.dtype), False)


MOST = 8  # × `every`: the longest period, so that a rate that falls to 0 does not end the averaging


@dataclass
class Periods:
    """All ranks make updates 1 to `warmup` together; then weights are averaged after each `every` local updates.

    With `adaptive` a period that begins at the learning rate r lasts ceil(every · sqrt(r_max / r)) updates, 8 · every
    at most, where r_max is the highest rate so far: AdaComm's rule for learning rates (Wang and Joshi 2019,
    arXiv:1810.08313).
    """

    every: int
    warmup: int = 0
    adaptive: bool = False
    # The last update of the present period; 0: none has begun.
    ends: int = field(default=0, init=False)
    highest: float = field(default=0.0, init=False)

    def is_local(self, update: int) -> bool:
        """Whether each rank makes this update (from 1) alone."""
        return update > self.warmup

    def see(self, rate: float) -> None:
        """Records the learning rate of an update."""
        self.highest = max(self.highest, rate)

    def begin(self, done: int, rate: float) -> None:
        """Begins a period after update `done`, at this learning rate."""
        if self.adaptive:
            self.ends = done + self.length(rate)
        else:  # at the same updates, wherever a training was resumed
            self.ends = done + self.every - (done - self.warmup) % self.every

    def length(self, rate: float) -> int:
        """The number of updates in a period that begins at this rate."""
        most = MOST * self.every
        if rate * MOST**2 <= self.highest:
            return most
        return min(ceil(self.every * sqrt(self.highest / rate) - 1e-9), most) if rate > 0 else self.every

    def is_over(self, update: int) -> bool:
        """Whether the ranks average after this update."""
        return update >= self.ends

    def state(self) -> list[float]:
        return [float(self.ends), self.highest]

    def load(self, state: list[float]) -> None:
        self.ends, self.highest = int(state[0]), state[1]
