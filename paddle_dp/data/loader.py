"""Reads a data set as batches of tensors, in a sampler's order, from any (epoch, batch) on.

    loader = Loader(dataset, Sampler(len(dataset), batch=64))
    for batch in loader.read(epoch=3, start=17): ...

Starting in the middle of an epoch costs nothing: no sample before it is read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.data.global_batches import GlobalBatches
from paddle_dp.data.sample import BatchShare, BatchSource, Dataset, InProcess
from paddle_dp.data.sampler import Sampler
from paddle_dp.data.scatter import ReadByMain, Received, Scatterer
from paddle_dp.data.stream import Stream
from paddle_dp.data.worker_pool import Prefetched
from paddle_dp.mesh.copies import copies_to, is_cpu, on_host, prefetch
from paddle_dp.mesh.device import current_device
from paddle_dp.structure import mapped

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh


class Loader:
    """Batches of `dataset` in the order of `sampler`, read here (`num_workers=0`) or ahead by worker processes.

    Workers keep `prefetch` batches under way and live from the first `read` until `close`; the batches are the same
    with and without them. `timeout`: seconds that one sample may take before its worker counts as hung.
    `global_batches`: the data set's collate_fn is given whole global batches, which every rank reads.
    A data set `ReadByMain` is read by rank 0, which sends the other ranks their samples; every rank reads the same
    batches in the same order then. `reads`: the sampler of what this rank reads itself; None: nothing.
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
        device: Any = None,
    ):
        scattered = dataset if isinstance(dataset, ReadByMain) else None
        dataset = dataset.dataset if isinstance(dataset, ReadByMain) else dataset
        if len(dataset) != sampler.samples:
            raise ValueError(
                f"sampler: made for {sampler.samples} samples, but the data set has {len(dataset)}"
            )
        if num_workers < 0 or prefetch < 1 or timeout <= 0:
            raise ValueError(
                f"num_workers: {num_workers}, prefetch: {prefetch}, timeout: {timeout} must be >= 0, >= 1, > 0"
            )
        self.dataset, self.sampler, self._device = dataset, sampler, device
        self.num_workers = num_workers
        self.reads: Sampler | None = sampler
        if scattered is not None:
            self.reads = replace(sampler, dp_rank=0, dp_size=1) if scattered.mesh.is_main else None
        self._source: BatchSource
        if scattered is not None and self.reads is None:
            self.num_workers, self._source = 0, Received(sampler, scattered.delivered)
            return
        reads = self.reads or sampler
        self._source = InProcess(dataset, reads)
        if global_batches:
            self._source = GlobalBatches(dataset, reads, num_workers, prefetch, timeout)
        elif num_workers:
            self._source = Prefetched(dataset, reads, num_workers, prefetch, timeout)
        if scattered is not None:
            self._source = Scatterer(self._source, sampler, scattered, prefetch if num_workers else 1)

    @classmethod
    def plain(cls, dataset: Dataset, batch: int, mesh: Mesh | None = None, **settings: Any) -> Loader:
        """A loader of global batches of `batch` samples, this rank's slice of each when `mesh` has several.

        Settings are those of `Sampler` (seed, shuffle, drop_last, micro_batches) and of `Loader` (num_workers,
        prefetch, timeout, global_batches, device).
        """
        names = ("seed", "shuffle", "drop_last", "micro_batches")
        of_sampler = {name: settings.pop(name) for name in names if name in settings}
        return cls(dataset, Sampler.for_mesh(len(dataset), batch, mesh, **of_sampler), **settings)

    @property
    def batches(self) -> int:
        """The number of global batches of an epoch."""
        return self.sampler.batches

    def read(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of `epoch` from global batch `start` on; none if `start` is the end of the epoch.

        On an accelerator each batch is read, and its copy begun, while the one before is still to be computed with.
        """
        if epoch < 0 or not 0 <= start <= self.batches:
            raise ValueError(f"start: batch {start} of epoch {epoch} is not one of 0 to {self.batches}")
        return self.read_shares(epoch, ((k, self.sampler.dp_rank) for k in range(start, self.batches)))

    def read_shares(self, epoch: int, shares: Iterator[tuple[int, int]]) -> Iterator[Batch]:
        """Shares of global batches, (batch, dp_rank), whichever ranks they would fall to: each is asked for when it is
        to be read, and the next one before that on an accelerator, the next `prefetch` with workers."""
        if isinstance(self.dataset, Stream):
            self.dataset.begin()
        device = self._device if self._device is not None else current_device()
        return prefetch(self._batches(epoch, shares, device), device)

    def _batches(self, epoch: int, shares: Iterator[tuple[int, int]], device: Any) -> Iterator[Batch]:
        begun_shares: deque[BatchShare] = deque()

        def begin_shares() -> Iterator[BatchShare]:
            sampler = self.sampler
            for k, dp_rank in shares:
                if dp_rank != sampler.dp_rank:
                    sampler = replace(sampler, dp_rank=dp_rank)
                begun_shares.append((k, sampler))
                yield k, sampler

        source = self._source.read(epoch, begin_shares())
        copy, keep_targets = copies_to(device), not is_cpu(device)
        while True:
            begun = time.perf_counter()
            if (arrays := next(source, None)) is None:
                return
            k, sampler = begun_shares.popleft()
            size = sampler.size(k)
            micro_batches = tuple(
                MicroBatch(
                    mapped(copy, inputs),
                    mapped(copy, targets),
                    count,
                    first,
                    host_targets=mapped(on_host, targets) if keep_targets else None,
                )
                for (inputs, targets, count), (first, _) in zip(arrays, sampler.cuts(size), strict=True)
            )
            yield Batch(micro_batches, size, k, epoch, time.perf_counter() - begun, sampler.seed)

    def workers_busy(self) -> float:
        """The CPU seconds of the workers that live now, so far; 0 without workers."""
        return self._source.workers_busy()

    def close(self) -> None:
        """Ends the workers; a later `read` starts new ones."""
        self._source.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
