"""Reads ahead in worker processes: the same batches in the same order, earlier.

The workers of a loader share a buffer of `prefetch` + 1 slots and fill each slot together, every worker some of its
rows. They are forked at the first read and live across epochs. A read that fails or is abandoned ends them, and so does
an attribute of the data set that the training process has changed since: the next read forks new ones.
"""

from __future__ import annotations

import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, BinaryIO, TypeVar

import numpy as np

from paddle_dp.batch import leaves, structure_of, unflatten
from paddle_dp.data.arrays import Pair, rows_of
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import (
    PAD,
    BatchShare,
    BatchSource,
    Dataset,
    MicroArrays,
    is_stacked,
    micro_batches_of,
    name,
    read_batch,
    read_samples,
    read_seeded,
    take,
)
from paddle_dp.data.sampler import Indices, Sampler, cut
from paddle_dp.data.shared_buffer import ArraySpec, SampleSpec, SharedBuffer
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

Job = TypeVar("Job")


class Pooled(BatchSource):
    """A source of batches that a pool of `workers` processes reads ahead; see Loader for the settings."""

    def __init__(self, dataset: Dataset, sampler: Sampler, workers: int, prefetch: int, timeout: float):
        self.dataset, self.sampler = dataset, sampler
        self.workers, self.prefetch, self.timeout = workers, prefetch, timeout
        self._pool: Pool | None = None
        self._forked: Any = None  # the data set's attributes when the pool was forked
        self._ended_busy = 0.0  # CPU seconds of earlier pools

    def _prefetched(
        self, epoch: int, jobs: Iterator[Job], start: Callable[[], Pool]
    ) -> Iterator[tuple[Job, Pair]]:
        """Yields each job with its arrays, while the pool reads for the next ones; `start` makes a pool if none is
        idle."""
        now = attributes(self.dataset)  # a callback may have changed them since the workers' fork
        if self._pool is None or self._pool.busy or self._pool.ended or now != self._forked:
            self.close()
            self._pool, self._forked = start(), now
        pool, begun = self._pool, deque[Job]()

        def begin() -> None:
            for job in islice(jobs, 1):
                begun.append(job)
                pool.begin(epoch, job)

        try:
            for _ in range(self.prefetch):
                begin()
            while begun:
                pair, job = pool.finish(), begun.popleft()
                begin()
                yield job, pair
        finally:
            if pool.busy:
                pool.end()

    def workers_busy(self) -> float:
        return self._ended_busy + (0.0 if self._pool is None else self._pool.busy_seconds())

    def close(self) -> None:
        if self._pool is not None:
            self._ended_busy += self._pool.busy_seconds()
            self._pool.end()
            self._pool = None


def attributes(dataset: Dataset) -> list[Any]:
    """The attributes of a data set and of the objects within it, for a comparison: numbers and texts, also in short
    lists, by value, anything else by its identity."""
    from paddle_dp.identity.walk import objects_within, readable_attributes, short_list  # it imports Paddle

    def value(thing: Any) -> Any:
        is_plain = issubclass(
            type(thing), (int, float, str, np.generic)
        )  # a dead proxy is an instance of nothing
        return (type(thing), str(thing)) if is_plain else _Same(thing)

    return [
        (
            _Same(each),
            {
                name: [*map(value, short_list(inner) or [inner])]
                for name, inner in readable_attributes(each).items()
            },
        )
        for each in objects_within(dataset)
    ]


class _Same:
    """Equals only another holder of the same object. It keeps the object: a new one could get its address."""

    def __init__(self, thing: Any):
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.thing is other.thing

    __hash__ = None  # type: ignore[assignment]


class Prefetched(Pooled):
    """A source of batches of which every worker reads some samples."""

    def read(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[list[MicroArrays]]:
        reads = (sampler.reads(epoch, k) for k, sampler in shares)
        first = next(reads, None)
        if first is None:
            return
        if not first:  # a server, which reads nothing: it needs no worker
            for _ in chain([first], reads):
                yield []
            return
        sample = epoch, int(first[0][0][0])

        def start() -> Pool:
            slots = self.prefetch + 1
            return WorkerPool(self.dataset, self.sampler, self.timeout, self.workers, slots, sample)

        for read, pair in self._prefetched(epoch, chain([first], reads), start):
            yield micro_batches_of(pair, read)


class GlobalBatches(Pooled):
    """A source of batches that are collated whole, for a collate_fn that sees all samples of a global batch, in this
    process (`workers=0`) or each by one worker; it keeps this data rank's rows."""

    def read(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[list[MicroArrays]]:
        def start() -> Pool:
            return BatchPool(self.dataset, self.sampler, self.timeout, self.workers)

        pairs = self._prefetched(epoch, shares, start) if self.workers else self._here(epoch, shares)
        for (k, sampler), (inputs, targets) in pairs:
            micro_batches = []
            for first, stop in sampler.cuts(sampler.size(k, epoch)):
                rows = slice(first, max(stop, first + 1))  # with the dummies of `Sampler.reads`
                micro_batches.append((rows_of(inputs, rows), rows_of(targets, rows), stop - first))
            yield micro_batches

    def _here(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[tuple[BatchShare, Pair]]:
        for k, sampler in shares:
            with restoring_globals():
                pair = read_batch(self.dataset, sampler.global_batch(epoch, k), sampler.seed, epoch)
            yield (k, sampler), pair


class WorkerError(Exception):
    """A worker's traceback, as the `__cause__` of the DataError that this process raises."""


class Pool:
    """Processes that read samples of `dataset`, seeded by (seed, epoch, index)."""

    def __init__(self, dataset: Dataset, seed: int, timeout: float):
        self.dataset, self.seed, self.timeout = dataset, seed, timeout
        self._workers: list[Worker] = []
        self._pending: deque[Any] = deque()  # the batches in flight, oldest first
        self._begun = 0  # the number of batches so far

    def begin(self, epoch: int, job: Any) -> None:
        """Starts reading a batch."""
        raise NotImplementedError

    def finish(self) -> Pair:
        """Waits for the oldest batch that was begun and returns its inputs and targets."""
        if self.ended:
            raise RuntimeError("this iterator was ended by a newer read, or by the loader's close()")
        pair = self._finish(self._pending[0])
        self._pending.popleft()
        return pair

    def _finish(self, batch: Any) -> Pair:
        raise NotImplementedError

    def _fork(self, workers: int, serve: WorkerMain) -> None:
        try:
            for _ in range(workers):
                self._workers.append(Worker(serve))
        except BaseException:
            self.end()
            raise

    @property
    def busy(self) -> bool:
        """True while a batch is being read."""
        return bool(self._pending)

    @property
    def ended(self) -> bool:
        """True after `end`, without workers."""
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
        """ "data worker 1 (process 4711), at sample 17 of epoch 0,"."""
        worker = self._workers[number]
        begun, index = worker.progress.tolist()
        at = f"at {name(self.dataset, index)} of epoch {epoch}" if begun else "before its first sample"
        return f"data worker {number} (process {worker.pid}), {at},"


class WorkerPool(Pool):
    """Workers that fill `slots` slots of shared memory, each slot together; all samples have the form of `sample`,
    (epoch, index)."""

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        timeout: float,
        workers: int,
        slots: int,
        sample: tuple[int, int],
    ):
        super().__init__(dataset, sampler.seed, timeout)
        self._buffer = SharedBuffer(self._spec_of(*sample), sampler.most_rows, slots)
        self._fork(workers, fill_main(dataset, sampler.seed, self._buffer))

    def _spec_of(self, epoch: int, index: int) -> SampleSpec:
        """The dtypes and shapes of a sample, read in a forked process.

        If it were read here, all workers would inherit the databases and threads that the data set opens at its
        first sample, which no fork can use.
        """
        self._fork(1, spec_main(self.dataset, self.seed, index))
        try:
            self._workers[0].send(command(epoch, 0, 0, 1))
            reply = self._receive(0, epoch)
        finally:
            self.end()
        arrays = tuple(ArraySpec(dtype, tuple(shape)) for dtype, shape in reply["spec"])
        return SampleSpec(arrays, reply["structure"], name(self.dataset, index))

    def begin(self, epoch: int, job: list[tuple[Indices, int]]) -> None:
        """Starts filling the next slot with the samples of a `Sampler.reads`. The parts rotate, so that all workers get
        equal work."""
        indices = np.concatenate([indices for indices, _ in job])
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

    def _finish(self, batch: tuple[int, int, deque[int]]) -> Pair:
        epoch, slot, filling = batch
        while filling:
            self._receive(filling[0], epoch)
            filling.popleft()
        return self._buffer.slots[slot].inputs, self._buffer.slots[slot].targets


class BatchPool(Pool):
    """Workers that make whole global batches in turn."""

    def __init__(self, dataset: Dataset, sampler: Sampler, timeout: float, workers: int):
        super().__init__(dataset, sampler.seed, timeout)
        self._fork(workers, batch_main(dataset, sampler))

    def begin(self, epoch: int, job: BatchShare) -> None:
        """Starts a share's global batch in the next worker."""
        number = self._begun % len(self._workers)
        self._workers[number].send(command(epoch, job[0], 0, 0))
        self._pending.append((epoch, number))
        self._begun += 1

    def _finish(self, batch: tuple[int, int]) -> Pair:
        epoch, number = batch
        reply = self._receive(number, epoch)
        inputs, targets = unflatten(reply["structure"], reply["arrays"])
        return inputs, targets


_COMMAND = struct.Struct("<qqqq")


def command(epoch: int, slot: int, first: int, stop: int) -> bytes:
    """The command to fill rows `first` to `stop` of `slot` with the samples of its indices, in `epoch`."""
    return _COMMAND.pack(epoch, slot, first, stop)


def spec_main(dataset: Dataset, seed: int, index: int) -> WorkerMain:
    """A main function that answers any command with the dtypes and shapes of sample `index`."""

    def read_spec(epoch: int, slot: int, first: int, stop: int, progress: Progress) -> Reply:
        progress[:] = 1, index
        inputs, targets = read_samples(dataset, np.array([index]), seed, epoch)
        spec = SampleSpec.from_pair((rows_of(inputs, 0), rows_of(targets, 0)))
        return {"spec": [[array.dtype, array.shape] for array in spec.arrays], "structure": spec.structure}

    return answering(read_spec)


def batch_main(dataset: Dataset, sampler: Sampler) -> WorkerMain:
    """A main function that answers a command with the arrays of a global batch."""

    def make(epoch: int, k: int, _first: int, _stop: int, progress: Progress) -> Reply:
        def at(index: int) -> None:
            progress[:] = progress[0] + 1, index

        pair = read_batch(dataset, sampler.global_batch(epoch, k), sampler.seed, epoch, at)
        return {"arrays": [np.asarray(leaf) for leaf in leaves(pair)], "structure": structure_of(pair)}

    return answering(make)


def fill_main(dataset: Dataset, seed: int, buffer: SharedBuffer) -> WorkerMain:
    """A main function that fills the rows of each command, then answers it."""
    at_once, spec = is_stacked(dataset), buffer.spec

    def check(index: int, pair: Pair) -> None:
        if difference := spec.difference(pair):
            different = f"{name(dataset, index)} is {difference} as {spec.example}"
            raise DataError(f"{different}: they cannot be stacked to a batch{PAD}")

    def fill(epoch: int, slot: int, first: int, stop: int, progress: Progress) -> Reply:
        rows = buffer.slots[slot].rows(first, stop)
        if at_once:
            progress[:] = progress[0] + 1, rows.indices[0]
            inputs, targets = take(dataset, rows.indices)
            check(int(rows.indices[0]), (rows_of(inputs, 0), rows_of(targets, 0)))
            rows.fill(slice(None), inputs, targets)
            return {}
        for row, index in enumerate(rows.indices.tolist()):
            progress[:] = progress[0] + 1, index
            pair = read_seeded(dataset, seed, epoch, index)
            check(index, pair)
            rows.fill(row, *pair)
        return {}

    return answering(fill)


def answering(do: Callable[[int, int, int, int, Progress], Reply]) -> WorkerMain:
    """A main function that calls `do` for each command and replies with its result or its error."""

    def serve(commands: BinaryIO, reply: Answer, progress: Progress) -> None:
        if "paddle" in sys.modules:  # a transform may make tensors: a fork cannot use its parent's GPU
            sys.modules["paddle"].set_device("cpu")
        while len(content := commands.read(_COMMAND.size)) == _COMMAND.size:
            try:
                epoch, slot, first, stop = _COMMAND.unpack(content)
                answer = do(epoch, slot, first, stop, progress)
            except Exception as error:  # noqa: BLE001 - the parent raises it
                answer = {"error": str(error), "traceback": traceback.format_exc()}
            reply(answer)

    return serve
