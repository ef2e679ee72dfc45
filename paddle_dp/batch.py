"""What one update reads: a batch, cut into micro-batches, with the numbers that make its gradients exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddle import Tensor


@dataclass(frozen=True, slots=True)
class Micro:
    """One forward and backward pass: inputs [n, ...], targets [n, ...], and how many of the n samples count.

    `samples` is 0 for a *dummy*: the one sample that a reader without any gets, so that it can take its part
    in the collectives of the pass. Whatever a dummy's loss is, it has to be multiplied by zero.
    `first` is the place of the first sample in the global batch; the others follow it, unless `places` says where each
    one is.
    """

    inputs: Tensor
    targets: Tensor
    samples: int
    first: int = 0
    places: tuple[int, ...] | None = None

    @property
    def is_dummy(self) -> bool:
        """Whether this micro-batch only keeps the ranks in step."""
        return self.samples == 0


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's slice of global batch `index` of `epoch`, in micro-batches.

    `samples` counts the *global* batch, over all ranks; `waited` is how many seconds the rank stood still for
    it. `seed` is what everything random in its update is drawn from, with (epoch, index) and places of samples.
    """

    micro_batches: tuple[Micro, ...]
    samples: int
    index: int
    epoch: int
    waited: float = 0.0
    seed: int = 0

    @property
    def mine(self) -> int:
        """How many samples of the global batch are this rank's."""
        return sum(micro_batch.samples for micro_batch in self.micro_batches)
