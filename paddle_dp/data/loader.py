"""Reads a data set as batches of tensors, in a sampler's order, starting at any (epoch, batch).

    loader = Loader(dataset, Sampler(len(dataset), batch=64))
    for batch in loader.read(epoch=3, start=17): ...

Starting in the middle of an epoch costs nothing: earlier samples are not read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any

from paddle_dp.batch import Batch, MicroBatch, mapped
from paddle_dp.data.mix import Mixing
from paddle_dp.data.sample import BatchShare, BatchSource, Dataset, InProcess
from paddle_dp.data.sampler import Sampler
from paddle_dp.data.scatter import ReadByMain, Received, Scatterer
from paddle_dp.data.stream import Stream
from paddle_dp.data.worker_pool import GlobalBatches, Prefetched
from paddle_dp.errors import UsageError
from paddle_dp.mesh.copies import copies_to, is_cpu, prefetch
from paddle_dp.mesh.device import current_device
from paddle_dp.tensors import on_host

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh
    from paddle_dp.recipe.schema import Mix


class Loader:
    """Batches of `dataset` in the order of `sampler`, read in this process (`num_workers=0`) or ahead by workers.

    Workers keep `prefetch` batches in flight and live from the first `read` until `close`, or until a `read` that
    finds an attribute of the data set changed; they do not change batches.
    `timeout`: seconds after which a worker counts as hung at a sample. `global_batches`: the collate_fn receives whole
    global batches, which every rank reads. Rank 0 reads a `ReadByMain` data set for all ranks, which must then read the
    same batches in the same order. `reads`: the sampler of the samples that this rank reads itself, or None. `mix`:
    each sample is mixed with the one before it in the global batch (data/mix.py).
    """

    def __init__(  # noqa: PLR0913 - settings of a recipe, as keywords
        self,
        dataset: Dataset | ReadByMain,
        sampler: Sampler,
        *,
        num_workers: int = 0,
        prefetch: int = 2,
        timeout: float = 120.0,
        global_batches: bool = False,
        mix: Mix | None = None,
        device: Any = None,
    ):
        scattered = dataset if isinstance(dataset, ReadByMain) else None
        dataset = dataset.dataset if isinstance(dataset, ReadByMain) else dataset
        if sampler.epoch_orders is None and len(dataset) != sampler.available:
            raise ValueError(
                f"sampler: made for {sampler.available} samples, but the data set has {len(dataset)}"
            )
        if num_workers < 0 or prefetch < 1 or timeout <= 0:
            raise ValueError(
                f"num_workers: {num_workers}, prefetch: {prefetch}, timeout: {timeout} must be >= 0, >= 1, > 0"
            )
        sampler = replace(sampler, with_previous=mix is not None)
        self._dataset, self.sampler, self._device = dataset, sampler, device
        self.num_workers = num_workers
        reads = sampler if scattered is None else replace(sampler, dp_rank=0, dp_size=1)
        self.reads: Sampler | None = reads
        self._source: BatchSource
        if scattered is not None and not scattered.mesh.is_main:
            self.reads, self.num_workers, self._source = None, 0, Received(sampler, scattered.delivered)
            return
        self._source = InProcess(dataset, reads)
        if global_batches:
            self._source = GlobalBatches(dataset, reads, num_workers, prefetch, timeout)
        elif num_workers:
            self._source = Prefetched(dataset, reads, num_workers, prefetch, timeout)
        if mix is not None:
            self._source = Mixing(self._source, mix, sampler.seed)
        if scattered is not None:
            self._source = Scatterer(self._source, sampler, scattered, prefetch if num_workers else 1)

    @classmethod
    def plain(cls, dataset: Dataset, batch: int, mesh: Mesh | None = None, **settings: Any) -> Loader:
        """A loader of global batches of `batch` samples; with a `mesh`, of this rank's slice of each.

        `settings` belong to `Sampler` (seed, shuffle, drop_last, micro_batches) or to `Loader` (num_workers, prefetch,
        timeout, global_batches, device).
        """
        names = ("seed", "shuffle", "drop_last", "micro_batches")
        sampler_settings = {name: settings.pop(name) for name in names if name in settings}
        return cls(dataset, Sampler.for_dataset(dataset, batch, mesh, **sampler_settings), **settings)

    @property
    def dataset(self) -> Dataset:
        return self._dataset

    @dataset.setter
    def dataset(self, dataset: Dataset) -> None:
        raise UsageError(
            f"a loader reads the data set that it was made for, not a {type(dataset).__name__} that it is given later. "
            "Change an attribute of the data set between two calls of fit (data workers have a copy of it), or make "
            "another Trainer.of with it."
        )

    @property
    def batches(self) -> int:
        """The number of global batches per epoch; with a ramp, of one after it."""
        return self.sampler.batches

    def read(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yields the batches of `epoch` from global batch `start` on; none if `start` is the end of the epoch.

        On an accelerator the next batch is read and its copy started before the current one is returned.
        """
        batches = self.sampler.batches_of(max(epoch, 0))
        if epoch < 0 or not 0 <= start <= batches:
            raise ValueError(f"start: batch {start} of epoch {epoch} is not one of 0 to {batches}")
        return self.read_shares(epoch, zip(range(start, batches), repeat(self.sampler.dp_rank), strict=False))

    def read_shares(self, epoch: int, shares: Iterator[tuple[int, int]]) -> Iterator[Batch]:
        """Yields the batches of `shares`, (global batch, dp_rank), for any data rank.

        A share is taken when it is read: one batch ahead on an accelerator, `prefetch` batches ahead with workers.
        """
        if isinstance(self.dataset, Stream):
            self.dataset.begin()
        device = self._device if self._device is not None else current_device()
        return prefetch(self._batches(epoch, shares, device), device)

    def _batches(self, epoch: int, shares: Iterator[tuple[int, int]], device: Any) -> Iterator[Batch]:
        def with_sampler() -> Iterator[BatchShare]:
            sampler = self.sampler
            for k, dp_rank in shares:
                if dp_rank != sampler.dp_rank:
                    sampler = replace(sampler, dp_rank=dp_rank)
                yield k, sampler

        source = self._source.read_with_shares(epoch, with_sampler())
        copy, keep_targets = copies_to(device), not is_cpu(device)
        while True:
            begun = time.perf_counter()
            if (read := next(source, None)) is None:
                return
            (k, sampler), arrays = read
            size = sampler.size(k, epoch)
            micro_batches = []
            for (inputs, targets, count), (first, _) in zip(arrays, sampler.cuts(size), strict=True):
                copied = mapped(copy, inputs), mapped(copy, targets)
                host_targets = mapped(on_host, targets) if keep_targets else None
                micro_batches.append(MicroBatch(*copied, count, first, host_targets=host_targets))
            yield Batch(tuple(micro_batches), size, k, epoch, time.perf_counter() - begun, sampler.seed)

    def workers_busy(self) -> float:
        """The CPU seconds so far of the running workers; 0 without workers."""
        return self._source.workers_busy()

    def close(self) -> None:
        """Ends the workers; a later `read` starts new ones."""
        self._source.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
