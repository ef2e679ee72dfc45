"""The input of one update: a batch, cut into micro-batches, with the numbers that make its gradients exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_dp.structure import leaves


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass: inputs [n, ...], targets [n, ...]; `samples` of the n rows count.

    Inputs and targets may be nested dicts or tuples of tensors with n rows each.

    `samples` is 0 for a *dummy*: one sample that a data rank without samples reads to take part in the collectives of
    the pass. Multiply its loss by zero.
    `first` is the position of the first sample in the global batch; the others follow it, unless `places` gives the
    position of each.
    `host_targets` is a copy in host memory, set on accelerators: counting it does not wait for the device.
    """

    inputs: Any
    targets: Any
    samples: int
    first: int = 0
    places: tuple[int, ...] | None = None
    host_targets: Any = None

    @property
    def rows(self) -> int:
        """n, of which `samples` count."""
        return len(leaves(self.targets)[0])

    @property
    def is_dummy(self) -> bool:
        """Whether this micro-batch is read for its collectives only."""
        return self.samples == 0


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's slice of global batch `index` of `epoch`, in micro-batches.

    `samples` counts the *global* batch, over all ranks. `waited`: seconds that this rank waited for the data. All
    random numbers of the update are drawn from `seed`, (epoch, index) and the samples' positions.
    """

    micro_batches: tuple[MicroBatch, ...]
    samples: int
    index: int
    epoch: int
    waited: float = 0.0
    seed: int = 0
