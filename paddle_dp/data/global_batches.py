"""Reads whole global batches, for a collate_fn that sees all of their samples, and keeps this data rank's rows.

Every data rank reads every sample, which makes the result equal on any number of ranks. Each worker process makes whole
batches. Their arrays may change shape from batch to batch, so they pass through a pipe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from paddle_dp.data.arrays import Arrays, Pair
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import BatchShare, Dataset, MicroArrays, read_batch
from paddle_dp.data.sampler import Sampler
from paddle_dp.data.worker import Progress, Reply, Worker, WorkerMain
from paddle_dp.data.worker_pool import Pool, Pooled, answering, command
from paddle_dp.structure import leaves, mapped, structure_of, unflatten


class GlobalBatches(Pooled["BatchPool"]):
    """A source of batches that are collated whole, in this process (`workers=0`) or ahead; see Loader for settings."""

    def read(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[list[MicroArrays]]:
        """Yields the micro-batches of each share."""
        pairs = self._prefetched(epoch, shares) if self.workers else self._here(epoch, shares)
        for (k, sampler), (inputs, targets) in pairs:
            # A rank without a sample computes with the batch's first one, so that it joins the collectives.
            slices = [
                (slice(first, stop) if stop > first else slice(0, 1), stop - first)
                for first, stop in sampler.cuts(sampler.size(k))
            ]
            yield [(_rows(inputs, rows), _rows(targets, rows), count) for rows, count in slices]

    def _here(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[tuple[BatchShare, Pair]]:
        for k, sampler in shares:
            with restoring_globals():
                pair = read_batch(self.dataset, sampler.global_batch(epoch, k), sampler.seed, epoch)
            yield (k, sampler), pair

    def _prefetched(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[tuple[BatchShare, Pair]]:
        pool = self._idle_pool()
        pending: deque[BatchShare] = deque()

        def begin() -> None:
            if (share := next(shares, None)) is not None:
                pending.append(share)
                pool.begin(epoch, share[0])

        try:
            for _ in range(self.prefetch):
                begin()
            while pending:
                pair, share = pool.finish(), pending.popleft()
                begin()
                yield share, pair
        finally:
            if pool.busy:
                pool.end()

    def _idle_pool(self) -> BatchPool:
        return self._idle(lambda: BatchPool(self.dataset, self.sampler, self.workers, self.timeout))


class BatchPool(Pool):
    """Workers that make whole batches in turn."""

    def __init__(self, dataset: Dataset, sampler: Sampler, workers: int, timeout: float):
        super().__init__(dataset, sampler.seed, timeout)
        self._pending: deque[tuple[int, int]] = deque()  # epoch, worker
        self._begun = 0
        try:
            for _ in range(workers):
                self._workers.append(Worker(batch_main(dataset, sampler)))
        except BaseException:
            self.end()
            raise

    def begin(self, epoch: int, k: int) -> None:
        """Starts global batch `k` in the next worker."""
        number = self._begun % len(self._workers)
        self._begun += 1
        self._workers[number].send(command(epoch, k, 0, 0))
        self._pending.append((epoch, number))

    def finish(self) -> Pair:
        """Waits for the oldest batch that was begun and returns it."""
        if self.ended:
            raise RuntimeError("this iterator was ended by a newer read, or by the loader's close()")
        epoch, number = self._pending[0]
        reply = self._receive(number, epoch)
        self._pending.popleft()
        inputs, targets = unflatten(reply["structure"], reply["arrays"])
        return inputs, targets


def batch_main(dataset: Dataset, sampler: Sampler) -> WorkerMain:
    """A worker's main function that answers a command with the arrays of a global batch."""

    def make(epoch: int, k: int, _first: int, _stop: int, progress: Progress) -> Reply:
        def at(index: int) -> None:
            progress[:] = progress[0] + 1, index

        pair = read_batch(dataset, sampler.global_batch(epoch, k), sampler.seed, epoch, at)
        return {"arrays": [np.asarray(leaf) for leaf in leaves(pair)], "structure": structure_of(pair)}

    return answering(make)


def _rows(arrays: Arrays, rows: slice) -> Arrays:
    return mapped(lambda array: array[rows], arrays)
