"""Reads ahead in worker processes: the same batches in the same order, earlier.

The workers of a loader share a buffer of `prefetch` + 1 slots and fill each slot together, every worker some of its
rows. They are forked at the first read and live across epochs. A read that fails or is abandoned ends them; the next
read forks new ones.
"""

from __future__ import annotations

import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np

from paddle_dp.data.arrays import Arrays, Pair
from paddle_dp.data.sample import (
    PAD,
    BatchShare,
    Dataset,
    MicroArrays,
    is_stacked,
    name,
    read_samples,
    read_seeded,
    take,
)
from paddle_dp.data.sampler import Indices, Sampler, cut
from paddle_dp.data.shared_buffer import ArraySpec, SampleSpec, SharedBuffer, Slot
from paddle_dp.data.worker import (
    Answer,
    Progress,
    Reply,
    Worker,
    WorkerEndedError,
    WorkerHungError,
    WorkerMain,
)
from paddle_dp.errors import DataError
from paddle_dp.structure import mapped

P = TypeVar("P", bound="Pool")


class Pooled(Generic[P]):
    """A source of batches that keeps a pool of `workers` reading processes; see Loader for the settings."""

    def __init__(self, dataset: Dataset, sampler: Sampler, workers: int, prefetch: int, timeout: float):
        self.dataset, self.sampler = dataset, sampler
        self.workers, self.prefetch, self.timeout = workers, prefetch, timeout
        self._pool: P | None = None

    def _idle(self, start: Callable[[], P]) -> P:
        """Returns the idle pool, or starts one."""
        if self._pool is None or self._pool.busy or self._pool.ended:
            self.close()
            self._pool = start()
        return self._pool

    def workers_busy(self) -> float:
        return 0.0 if self._pool is None else self._pool.busy_seconds()

    def close(self) -> None:
        """Ends the workers; the next read forks new ones."""
        if self._pool is not None:
            self._pool.end()
            self._pool = None


class Prefetched(Pooled["WorkerPool"]):
    """A source of batches that `workers` processes read ahead; see Loader for the settings."""

    def read(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[list[MicroArrays]]:
        """Yields the micro-batches of each share: views, valid until the next share is taken."""
        reads = (sampler.reads(epoch, k) for k, sampler in shares)
        first = next(reads, None)
        if first is None:
            return
        pool = self._idle_pool(epoch, int(first[0][0][0]))
        rest = chain([first], reads)
        pending: deque[list[tuple[Indices, int]]] = deque()

        def begin() -> None:
            if (read := next(rest, None)) is not None:
                pending.append(read)
                pool.begin(epoch, np.concatenate([indices for indices, _ in read]))

        try:
            for _ in range(self.prefetch):
                begin()
            while pending:
                inputs, targets = pool.finish()
                micro_batches, row = [], 0
                for indices, count in pending.popleft():
                    rows = slice(row, row := row + len(indices))
                    micro_batches.append((_rows(inputs, rows), _rows(targets, rows), count))
                begin()
                yield micro_batches
        finally:
            if pool.busy:
                pool.end()

    def _idle_pool(self, epoch: int, index: int) -> WorkerPool:
        """Returns an idle pool; `index` is a sample that it will read."""

        def start() -> WorkerPool:
            pool = self._pool = WorkerPool(self.dataset, self.sampler.seed, self.timeout)
            pool.start(self.workers, self.sampler.most_rows, self.prefetch + 1, sample=(epoch, index))
            return pool

        return self._idle(start)


class WorkerError(Exception):
    """A worker's traceback, as the `__cause__` of the DataError that this process raises."""


class Pool:
    """Processes that read samples of `dataset`, seeded by (seed, epoch, index)."""

    def __init__(self, dataset: Dataset, seed: int, timeout: float):
        self.dataset, self.seed, self.timeout = dataset, seed, timeout
        self._workers: list[Worker] = []
        self._pending: deque[Any] = deque()  # the batches in flight, oldest first

    @property
    def busy(self) -> bool:
        """True while a batch is being read."""
        return bool(self._pending)

    @property
    def ended(self) -> bool:
        """True before `start` and after `end`, without workers."""
        return not self._workers

    def busy_seconds(self) -> float:
        """The CPU seconds of all workers so far."""
        return sum(worker.busy_seconds() for worker in self._workers)

    def end(self) -> None:
        """Kills all workers."""
        while self._workers:
            self._workers.pop().end()
        self._pending.clear()

    def _receive(self, number: int, epoch: int) -> Reply:
        """Returns the worker's next reply. Raises DataError with the worker, the sample and the reason if it failed."""
        worker = self._workers[number]
        try:
            reply = worker.receive(self.timeout)
        except WorkerHungError:
            hung = f"stood still for {self.timeout:g} s (loader.timeout, for one sample) and was ended"
            raise DataError(f"{self._named(number, epoch)} {hung}") from None
        except WorkerEndedError as error:
            raise DataError(f"{self._named(number, epoch)} {error}") from None
        if "error" in reply:
            raise DataError(reply["error"]) from WorkerError("\n" + reply["traceback"])
        return reply

    def _named(self, number: int, epoch: int) -> str:
        """«data worker 1 (process 4711), at sample 17 of epoch 0,»."""
        worker = self._workers[number]
        begun, index = worker.progress.tolist()
        at = f"at {name(self.dataset, index)} of epoch {epoch}" if begun else "before its first sample"
        return f"data worker {number} (process {worker.pid}), {at},"


class WorkerPool(Pool):
    """Workers that fill slots of shared memory."""

    def __init__(self, dataset: Dataset, seed: int, timeout: float):
        super().__init__(dataset, seed, timeout)
        self._pending: deque[tuple[int, int, deque[int]]] = deque()  # epoch, slot, workers still filling it
        self._begun = 0

    def start(self, workers: int, rows: int, slots: int, sample: tuple[int, int]) -> None:
        """Makes a buffer for samples like `sample`, (epoch, index), and forks the workers."""
        try:
            self._buffer = SharedBuffer(self._spec_of(*sample), rows, slots)
            serve = fill_main(self.dataset, self.seed, self._buffer)
            for _ in range(workers):
                self._workers.append(Worker(serve))
        except BaseException:
            self.end()
            raise

    def _spec_of(self, epoch: int, index: int) -> SampleSpec:
        """The dtypes and shapes of a sample, read in a forked process.

        If it were read here, all workers would inherit a file that the data set opens at its first sample, and share
        its position.
        """
        self._workers.append(Worker(spec_main(self.dataset, self.seed, index)))
        self._workers[0].send(command(epoch, 0, 0, 1))
        reply = self._receive(0, epoch)
        self.end()
        arrays = tuple(ArraySpec(dtype, tuple(shape)) for dtype, shape in reply["spec"])
        return SampleSpec(arrays, reply["structure"])

    def begin(self, epoch: int, indices: Indices) -> None:
        """Starts filling the next slot with these samples. The parts rotate, so that all workers get equal work."""
        slot, workers = self._begun % len(self._buffer.slots), len(self._workers)
        self._buffer.slots[slot].indices[: len(indices)] = indices
        filling: deque[int] = deque()
        for position in range(workers):
            first, stop = cut(len(indices), position, workers)
            if first < stop:
                filling.append((position + self._begun) % workers)
                self._workers[filling[-1]].send(command(epoch, slot, first, stop))
        self._pending.append((epoch, slot, filling))
        self._begun += 1

    def finish(self) -> Pair:
        """Waits for the oldest slot that was begun and returns its inputs and targets."""
        if self.ended:
            raise RuntimeError("this iterator was ended by a newer read, or by the loader's close()")
        epoch, slot, filling = self._pending[0]
        while filling:
            self._receive(filling[0], epoch)
            filling.popleft()
        self._pending.popleft()
        return self._buffer.slots[slot].inputs, self._buffer.slots[slot].targets


_COMMAND = struct.Struct("<qqqq")


def command(epoch: int, slot: int, first: int, stop: int) -> bytes:
    """The command to fill rows `first` to `stop` of `slot` with the samples of its indices, in `epoch`."""
    return _COMMAND.pack(epoch, slot, first, stop)


def spec_main(dataset: Dataset, seed: int, index: int) -> WorkerMain:
    """A main function that answers any command with the dtypes and shapes of sample `index`."""

    def read_spec(epoch: int, slot: int, first: int, stop: int, progress: Progress) -> Reply:
        progress[:] = 1, index
        inputs, targets = read_samples(dataset, np.array([index]), seed, epoch)
        spec = SampleSpec.from_pair((_rows(inputs, 0), _rows(targets, 0)))
        return {"spec": [[array.dtype, array.shape] for array in spec.arrays], "structure": spec.structure}

    return answering(read_spec)


def fill_main(dataset: Dataset, seed: int, buffer: SharedBuffer) -> WorkerMain:
    """A main function that fills the rows of each command, then answers it."""
    fill_rows = _fill_stacked if is_stacked(dataset) else _fill_each

    def fill(epoch: int, slot: int, first: int, stop: int, progress: Progress) -> Reply:
        rows = buffer.slots[slot].rows(first, stop)
        fill_rows(dataset, (seed, epoch), rows, buffer.spec, progress)
        return {}

    return answering(fill)


def _fill_stacked(
    dataset: Dataset, _key: tuple[int, int], rows: Slot, spec: SampleSpec, progress: Progress
) -> None:
    progress[:] = progress[0] + 1, rows.indices[0]
    inputs, targets = take(dataset, rows.indices)
    _check(dataset, int(rows.indices[0]), spec, (_rows(inputs, 0), _rows(targets, 0)))
    rows.fill(slice(None), inputs, targets)


def _fill_each(
    dataset: Dataset, key: tuple[int, int], rows: Slot, spec: SampleSpec, progress: Progress
) -> None:
    for row, index in enumerate(rows.indices.tolist()):
        progress[:] = progress[0] + 1, index
        pair = read_seeded(dataset, *key, index)
        _check(dataset, index, spec, pair)
        rows.fill(row, *pair)


def _rows(arrays: Arrays, rows: int | slice) -> Arrays:
    """One or several rows of every array."""
    return mapped(lambda array: array[rows], arrays)


def _check(dataset: Dataset, index: int, spec: SampleSpec, pair: Pair) -> None:
    if difference := spec.difference(pair):
        raise DataError(
            f"{name(dataset, index)} is {difference} as others: they cannot be stacked to a batch{PAD}"
        )


def answering(do: Callable[[int, int, int, int, Progress], Reply]) -> WorkerMain:
    """A main function that calls `do` for each command and replies with its result or its error."""

    def serve(commands: BinaryIO, reply: Answer, progress: Progress) -> None:
        _stay_on_cpu()
        while len(content := commands.read(_COMMAND.size)) == _COMMAND.size:
            try:
                epoch, slot, first, stop = _COMMAND.unpack(content)
                answer = do(epoch, slot, first, stop, progress)
            except Exception as error:  # noqa: BLE001 - the parent raises it
                answer = {"error": str(error), "traceback": traceback.format_exc()}
            reply(answer)

    return serve


def _stay_on_cpu() -> None:
    """Puts tensors that a transform makes on the CPU: a forked process cannot use its parent's GPU."""
    if "paddle" in sys.modules:
        sys.modules["paddle"].set_device("cpu")
