"""Wrong samples: read twice, never, in another order, or with another sample's target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from tests.proof.zoo.case import Fault, Setting
from tests.proof.zoo.patching import last, rank, ranks, replaced

SHARE = "paddle_dp.data.sampler:Sampler"


def everybody_reads_the_first_share() -> AbstractContextManager[None]:
    def make(cuts: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, size: cuts(replace(self, dp_rank=0), size)

    return replaced(f"{SHARE}.cuts", make)


def padded_shares() -> AbstractContextManager[None]:
    """As DistributedBatchSampler: all ranks get as many as the largest share, the last samples are read twice."""

    def make(cuts: Callable[..., Any]) -> Callable[..., Any]:
        def padded(self: Any, size: int) -> list[tuple[int, int]]:
            found = []
            for micro_batch, (start, _) in enumerate(cuts(self, size)):
                low = micro_batch * size // self.micro_batches
                high = (micro_batch + 1) * size // self.micro_batches
                each = -(-(high - low) // self.dp_size)
                start = min(start, high - each)
                found.append((start, start + each))
            return found

        return padded

    return replaced(f"{SHARE}.cuts", make)


def dropped_remainder() -> AbstractContextManager[None]:
    def make(cuts: Callable[..., Any]) -> Callable[..., Any]:
        def even(self: Any, size: int) -> list[tuple[int, int]]:
            least = size // self.micro_batches // self.dp_size
            return [(start, start + min(least, stop - start)) for start, stop in cuts(self, size)]

        return even if ranks() > 1 else cuts

    return replaced(f"{SHARE}.cuts", make)


def each_rank_shuffles_for_itself() -> AbstractContextManager[None]:
    def make(order: Callable[..., Any]) -> Callable[..., Any]:
        return lambda samples, seed, epoch: order(samples, seed + 1000 * rank(), epoch)

    return replaced("paddle_dp.data.sampler:_order", make)


def order_of_the_first_epoch() -> AbstractContextManager[None]:
    def make(order: Callable[..., Any]) -> Callable[..., Any]:
        return lambda samples, seed, epoch: order(samples, seed, 0 if ranks() > 1 else epoch)

    return replaced("paddle_dp.data.sampler:_order", make)


def targets_of_the_next_sample() -> AbstractContextManager[None]:
    return _read_as(lambda inputs, targets: (inputs, np.roll(targets, 1, axis=0) if last() else targets))


def _read_as(change: Callable[[Any, Any], tuple[Any, Any]]) -> AbstractContextManager[None]:
    """What a rank reads of a micro-batch, changed."""

    def make(init: Callable[..., Any]) -> Callable[..., Any]:
        def changing(self: Any, *given: Any) -> None:
            init(self, *given)
            read = self._read
            self._read = lambda *which: change(*read(*which))

        return changing

    return replaced("paddle_dp.data.sample:InProcess.__init__", make)


def normalized_by_the_own_share() -> AbstractContextManager[None]:
    return _read_as(
        lambda inputs, targets: ((inputs - inputs.mean() if ranks() > 1 else inputs - 0.3), targets)
    )


def two_samples_change_places() -> AbstractContextManager[None]:
    """Sample 0 of every batch is read in the place of its last one, too: one twice, one never."""

    def make(whole: Callable[..., Any]) -> Callable[..., Any]:
        def swapped(self: Any, epoch: int, k: int) -> Any:
            found = np.array(whole(self, epoch, k))
            if last():
                found[-1] = found[0]
            return found

        return swapped

    return replaced(f"{SHARE}.global_batch", make)


MLP = Setting("mlp")
FAULTS = (
    Fault(
        name="same share",
        says="Every rank reads the first rank's share: half of the samples are never seen.",
        source="Paddle's DataParallel examples with a plain DataLoader",
        setting=MLP,
        patch=everybody_reads_the_first_share,
    ),
    Fault(
        name="padded shares",
        says="Shares are made equal by reading samples of the short batch twice.",
        source="paddle.io.DistributedBatchSampler",
        setting=MLP,
        patch=padded_shares,
    ),
    Fault(
        name="dropped remainder",
        says="What the ranks cannot share equally is dropped.",
        source="samplers with drop_last",
        setting=MLP,
        patch=dropped_remainder,
    ),
    Fault(
        name="own shuffle",
        says="Each rank shuffles with a seed of its own and then takes its share: some samples twice, some never.",
        source="silent-fault catalogue, DATA",
        setting=MLP,
        patch=each_rank_shuffles_for_itself,
        guard="door",
    ),
    Fault(
        name="stale epoch",
        says="Nobody tells the sampler the epoch: each is read in the order of the first.",
        source="paddle.io.DistributedBatchSampler without set_epoch",
        setting=Setting("mlp", 2, ("train.length=2 epochs",)),
        patch=order_of_the_first_epoch,
        exam="rehearsal",
        guard="rehearsal",
    ),
    Fault(
        name="shifted targets",
        says="On the last rank each input comes with its neighbour's target.",
        source="silent-fault catalogue, DATA",
        setting=MLP,
        patch=targets_of_the_next_sample,
    ),
    Fault(
        name="own statistics",
        says="Each rank takes the mean of its own share away from the inputs.",
        source="silent-fault catalogue, DATA",
        setting=MLP,
        patch=normalized_by_the_own_share,
    ),
    Fault(
        name="sample twice",
        says="The last rank reads the first sample of each batch in place of the last one.",
        source="silent-fault catalogue, DATA",
        setting=MLP,
        patch=two_samples_change_places,
        guard="door",
    ),
)
