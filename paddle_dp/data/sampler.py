"""Assigns every sample of an epoch to exactly one rank, computed from (seed, epoch, dp_rank, dp_size).

    order of an epoch         a permutation that depends on seed and epoch only, or the data set's `epoch_order`
    global batch k            the k-th run of `batch` samples of that order, on any number of ranks; of fewer samples in
                              the first updates under a ramp (`RampedEpochs`)
    micro-batch j of it       the j-th of `micro_batches` consecutive slices, on any number of ranks
    a data rank's slice       dp_rank's slice of that micro-batch; sizes differ by one sample at most, may be 0

Nothing is padded, repeated or dropped, except an incomplete last batch under `drop_last`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paddle_dp.data.stream import has_method
from paddle_dp.errors import DataError
from paddle_dp.units import Length

if TYPE_CHECKING:
    from paddle_dp.recipe.train_schema import BatchRamp

Indices = NDArray[np.int64]


def cut(things: int, number: int, count: int) -> tuple[int, int]:
    """Start and stop of part `number` when `things` items are cut into `count` consecutive parts."""
    return number * things // count, (number + 1) * things // count


@lru_cache(maxsize=64)
def _cuts(size: int, micro_batches: int, dp_rank: int, dp_size: int) -> list[tuple[int, int]]:
    """See `Sampler.cuts`; starts are less than `size`. An epoch has few batch sizes, so the cache makes this free."""
    cuts: list[tuple[int, int]] = []
    for micro_batch in range(micro_batches if dp_rank >= 0 else 0):
        start, stop = cut(size, micro_batch, micro_batches)
        low, high = cut(stop - start, dp_rank, dp_size)
        cuts.append((start + low, start + high))
    return cuts


@lru_cache(maxsize=4)
def _order(samples: int, seed: int, epoch: int) -> Indices:
    """The permutation of `samples` for (seed, epoch), read-only.

    It sorts Philox's raw stream instead of calling `Generator.permutation`: NumPy guarantees that raw streams never
    change, so a run resumed under a newer NumPy continues the same epoch.
    """
    raw = np.random.Philox(np.random.SeedSequence((seed % 2**64, epoch))).random_raw(samples)
    order = np.argsort(raw, kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


@lru_cache(maxsize=4)
def _in_order(samples: int, dataset_samples: int) -> Indices:
    order = np.arange(samples, dtype=np.int64) * dataset_samples // samples
    order.setflags(write=False)
    return order


def is_ordered(dataset: Any) -> bool:
    """Whether a data set states the order of each epoch of a training, as a mixture does: `epoch_order(seed, epoch)` is
    the indices of the epoch's samples, int [samples], as many in each epoch; a function of (seed, epoch) alone. An
    index that occurs twice is augmented equally both times."""
    return has_method(dataset, "epoch_order")


class EpochOrders:
    """The orders that `dataset` states (`is_ordered`), checked; the latest two are kept. Raises DataError for anything
    but indices."""

    def __init__(self, dataset: Any):
        self._name, self._count, self._order = type(dataset).__name__, len(dataset), dataset.epoch_order
        self._checked = lru_cache(maxsize=2)(self._read)

    def __call__(self, seed: int, epoch: int) -> Indices:
        """The order of an epoch, int64 [samples], read-only."""
        return self._checked(seed, epoch)

    def refuse_random(self, seed: int) -> None:
        """Raises DataError if epoch 0 has another order each time."""
        if not np.array_equal(self(seed, 0), self._read(seed, 0)):
            raise DataError(
                f"{self._name}.epoch_order({seed}, 0) is another one each time: draw from "
                "numpy.random.default_rng((seed, epoch)), so that all ranks and a resumed run have the same"
            )

    def _read(self, seed: int, epoch: int) -> Indices:
        call = f"{self._name}.epoch_order({seed}, {epoch})"
        try:
            order = np.array(self._order(seed, epoch))
        except Exception as error:  # the method is the user's
            raise DataError(f"{call}: {type(error).__name__}: {error}") from error
        if order.ndim != 1 or order.dtype.kind not in "iu" or not len(order):
            raise DataError(f"{call} is {order.dtype}{list(order.shape)}, and not a list of indices")
        low, high = int(order.min()), int(order.max())
        if low < 0 or high >= self._count:
            raise DataError(
                f"{call} has {low} to {high}, and the data set has the indices 0 to {self._count - 1}"
            )
        order = order.astype(np.int64, copy=False)
        order.setflags(write=False)
        return order


@dataclass(frozen=True)
class Sampler:
    """The samples that data rank `dp_rank` of `dp_size` reads of `samples`, in global batches of `batch`.

    A rank that only serves others has `dp_rank` −1: it reads no samples and has no micro-batches.
    """

    samples: int
    batch: int
    dp_rank: int = 0
    dp_size: int = 1
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    micro_batches: int = 1
    with_previous: bool = False
    """Whether `reads` begins with one more sample, the one before a slice in its global batch: for the first sample of
    the batch the last one. See data/mix.py."""
    dataset_samples: int | None = None
    """The length of the data set, if only `samples` of it are read: at equal distances, since many data sets are sorted
    by class. Without `shuffle` only."""
    epoch_orders: EpochOrders | None = None
    """The order of each epoch under `shuffle`, of a data set that states it; else a permutation."""
    ramp: BatchRamp | None = None
    """Global batches of the first updates are smaller (`RampedEpochs`)."""

    def __post_init__(self) -> None:
        counts = {"batch": self.batch, "dp_size": self.dp_size, "micro_batches": self.micro_batches}
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name}: {count} is less than 1")
        if not -1 <= self.dp_rank < self.dp_size:
            raise ValueError(f"dp_rank: {self.dp_rank} is not one of -1 to {self.dp_size - 1}")
        if self.samples < 1:
            raise DataError("the data set is empty: its len() is 0")
        if self.dataset_samples is not None and (self.shuffle or self.dataset_samples < self.samples):
            raise ValueError(
                f"dataset_samples: {self.dataset_samples} is less than samples, or they are shuffled"
            )
        if not self.batches:
            problem = f"drop_last: true leaves nothing of {self.samples} samples in batches of {self.batch}"
            raise DataError(f"{problem}; set drop_last: false, or make the batch smaller")

    @cached_property
    def batches(self) -> int:
        """The number of global batches per epoch; with a ramp, of one after it."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def batches_of(self, epoch: int) -> int:
        """The number of global batches of this epoch."""
        return self.batches if (bounds := self._bounds(epoch)) is None else len(bounds) - 1

    def position(self, update: int) -> tuple[int, int]:
        """The epoch and the global batch in it of an update, counted from 0."""
        epoch, before = (0, 0) if self._ramped is None else self._ramped.epoch_of(update)
        if self._bounds(epoch) is not None:
            return epoch, update - before
        more, k = divmod(update - before, self.batches)
        return epoch + more, k

    def updates(self, length: Length) -> int:
        """The number of updates of the first `length` of a training."""
        if self._ramped is None or length.unit == "steps":
            return length.steps(self.batches)
        epochs = int(length.count)
        part = round((length.count - epochs) * self.batches_of(epochs))
        return sum(map(self.batches_of, range(epochs))) + part

    def epochs(self, updates: int) -> float:
        """The number of epochs in the first `updates` of a training."""
        epoch, k = self.position(updates)
        return epoch + k / self.batches_of(epoch)

    @cached_property
    def _ramped(self) -> RampedEpochs | None:
        if self.ramp is None:
            return None
        return ramped_epochs(self.samples, self.batch, self.ramp, self.drop_last)

    def _bounds(self, epoch: int) -> Indices | None:
        return None if self._ramped is None else self._ramped.bounds(epoch)

    @property
    def available(self) -> int:
        """The samples of an epoch, or, if only some are read, those to choose from."""
        return self.dataset_samples or self.samples

    @property
    def rows(self) -> int:
        """The largest number of samples, dummies included, that this data rank reads for one global batch."""
        full = replace(self, ramp=None)  # slices of the first and the last data rank grow with the batch
        sizes = {full.size(0), full.size(full.batches - 1)}
        more = int(self.with_previous)
        return max(sum(max(stop - start, 1) + more for start, stop in self.cuts(size)) for size in sizes)

    @property
    def most_rows(self) -> int:
        """The largest `rows` of all data ranks."""
        return max(replace(self, dp_rank=dp_rank).rows for dp_rank in (0, self.dp_size - 1))

    def size(self, k: int, epoch: int | None = None) -> int:
        """The number of samples of global batch `k`: `batch`, or the remainder for the last one. With a ramp it depends
        on the epoch, too."""
        if self.ramp is not None and epoch is None:
            raise ValueError(f"global batch {k}: its size depends on the epoch (train.batch_ramp)")
        start, stop = self._span(epoch or 0, k)
        return stop - start

    def _span(self, epoch: int, k: int) -> tuple[int, int]:
        """Where global batch `k` begins and ends in the order of the epoch."""
        bounds = self._bounds(epoch)
        batches = self.batches if bounds is None else len(bounds) - 1
        if not 0 <= k < batches:
            raise IndexError(f"global batch {k}: an epoch has batches 0 to {batches - 1}")
        if bounds is None:
            return k * self.batch, min((k + 1) * self.batch, self.samples)
        return int(bounds[k]), int(bounds[k + 1])

    def order(self, epoch: int) -> Indices:
        """All samples in this epoch's order, int64 [samples], read-only; depends on (seed, epoch) only. Raises
        DataError for a stated order of another length."""
        if not self.shuffle:
            return _in_order(self.samples, self.available)
        if self.epoch_orders is None:
            return _order(self.samples, self.seed, epoch)
        order = self.epoch_orders(self.seed, epoch)
        if len(order) != self.samples:
            raise DataError(
                f"epoch_order gives {len(order)} samples for epoch {epoch} and {self.samples} for epoch 0: let it give "
                "as many in each epoch"
            )
        return order

    def global_batch(self, epoch: int, k: int) -> Indices:
        """The samples of global batch `k` on all ranks."""
        start, stop = self._span(epoch, k)
        return self.order(epoch)[start:stop]

    def local_batch(self, epoch: int, k: int) -> list[Indices]:
        """This data rank's samples of each micro-batch of global batch `k`; some may be empty."""
        batch = self.global_batch(epoch, k)
        return [batch[start:stop] for start, stop in self.cuts(len(batch))]

    def reads(self, epoch: int, k: int) -> list[tuple[Indices, int]]:
        """For each micro-batch of global batch `k`: the samples to read, and how many of them count.

        If `local_batch` has none, the sample at which the slice would begin is read as a dummy, and the count is 0: so
        reading never goes back within an epoch.
        """
        batch = self.global_batch(epoch, k)
        cuts = self.cuts(len(batch))
        if more := int(self.with_previous):  # the last sample comes before the first
            batch = np.concatenate((batch[-1:], batch))
        return [(batch[start : max(stop, start + 1) + more].copy(), stop - start) for start, stop in cuts]

    def cuts(self, size: int) -> list[tuple[int, int]]:
        """Start and stop of this data rank's slice of each micro-batch in a global batch of `size` samples."""
        return _cuts(size, self.micro_batches, self.dp_rank, self.dp_size)

    def samples_of_rank(self, dp_rank: int, dp_size: int) -> int:
        """The number of samples of a full global batch that a data rank reads."""
        cuts = _cuts(min(self.batch, self.samples), self.micro_batches, dp_rank, dp_size)
        return sum(stop - start for start, stop in cuts)

    @classmethod
    def for_mesh(cls, samples: int, batch: int, mesh: Any = None, **settings: Any) -> Sampler:
        """The sampler of this rank of `mesh`; without a mesh, of a single process."""
        coords = {} if mesh is None else {"dp_rank": mesh.dp_rank, "dp_size": mesh.dp_size}
        return cls(samples, batch, **coords, **settings)

    @classmethod
    def for_dataset(
        cls, dataset: Any, batch: int, mesh: Any = None, *, samples: int | None = None, **settings: Any
    ) -> Sampler:
        """`for_mesh`, in the order that `dataset` states, if it is to be shuffled and states one. `samples` of it, by
        default all, or as many as its order has."""
        if settings.get("shuffle", True) and is_ordered(dataset):
            settings["epoch_orders"] = orders = EpochOrders(dataset)
            orders.refuse_random(settings.get("seed", 0))
            samples = len(orders(settings.get("seed", 0), 0))
        return cls.for_mesh(len(dataset) if samples is None else samples, batch, mesh, **settings)


class RampedEpochs:
    """The epochs of `samples` samples in which global batches are not of `batch` samples yet (train.batch_ramp).

    Update u of a training takes min(batch, start + increment · (u // every)) samples (Megatron's
    `--rampup-batch-size`, by updates). An epoch is cut into global batches from its first sample on, the last one
    short, as without a ramp; so where batch k of an epoch begins follows from the sizes of all updates before it, which
    are numbers of the recipe. Nothing is remembered: a sampler computes the same cuts on any number of ranks, and after
    a resume. From the first epoch that begins with full batches on, all epochs are alike.
    """

    def __init__(self, samples: int, batch: int, ramp: BatchRamp, drop_last: bool):
        self._samples, self._batch, self._ramp, self._drop_last = samples, batch, ramp, drop_last
        self._bounds: list[NDArray[np.int64]] = []
        self._updates = [0]  # before each epoch

    def bounds(self, epoch: int) -> NDArray[np.int64] | None:
        """Where the global batches of an epoch begin and the last one ends, int64 [batches + 1], in samples; None if
        the epoch begins with full batches."""
        while len(self._bounds) <= epoch:
            if self._ramp.size(self._updates[-1], self._batch) == self._batch:
                return None
            self._bounds.append(self._next())
            self._updates.append(self._updates[-1] + len(self._bounds[-1]) - 1)
        return self._bounds[epoch]

    def epoch_of(self, update: int) -> tuple[int, int]:
        """The epoch of an update, counted from 0, and the updates before that epoch; an update after the ramp's epochs
        is counted into the first epoch that follows them."""
        epoch = 0
        while self.bounds(epoch) is not None and self._updates[epoch + 1] <= update:
            epoch += 1
        return epoch, self._updates[epoch]

    def _next(self) -> NDArray[np.int64]:
        most = -(-self._samples // self._ramp.start)  # batches of an epoch
        sizes = [self._ramp.size(self._updates[-1] + number, self._batch) for number in range(most)]
        ends = np.cumsum(sizes)
        count = int(np.searchsorted(ends, self._samples, side="right"))  # full batches
        bounds = [0, *ends[:count].tolist()]
        if bounds[-1] < self._samples and not self._drop_last:
            bounds.append(self._samples)
        return np.array(bounds, dtype=np.int64)


@lru_cache(maxsize=8)
def ramped_epochs(samples: int, batch: int, ramp: BatchRamp, drop_last: bool) -> RampedEpochs:
    """The same object for the same numbers, which has computed them once."""
    return RampedEpochs(samples, batch, ramp, drop_last)
