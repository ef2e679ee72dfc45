"""Reading ahead in worker processes: the same batches in the same order, only sooner.

The workers of a loader share a buffer of `prefetch` + 1 slots and fill a slot together, each some of its rows. They are
forked at the first read and live from epoch to epoch; a read that fails, or is left before its end, ends them, and the
next read forks new ones.
"""

from __future__ import annotations

import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

from paddle_dp.data.randomness import seed_sample
from paddle_dp.data.sample import (
    Array,
    Dataset,
    MicroArrays,
    is_stacked,
    name,
    read_sample,
    read_samples,
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


class Prefetched:
    """A source of batches that `workers` processes read ahead; see Loader for the settings."""

    def __init__(self, dataset: Dataset, sampler: Sampler, workers: int, prefetch: int, timeout: float):
        self.dataset, self.sampler = dataset, sampler
        self.workers, self.prefetch, self.timeout = workers, prefetch, timeout
        self._pool: WorkerPool | None = None

    def read(self, epoch: int, start: int) -> Iterator[list[MicroArrays]]:
        """The micro-batches of each global batch from `start` on; views that hold until the next batch is asked for."""
        if start == self.sampler.batches:
            return
        pool = self._idle_pool(epoch, int(self.sampler.reads(epoch, start)[0][0][0]))
        batches = iter(range(start, self.sampler.batches))
        begun: deque[list[tuple[Indices, int]]] = deque()

        def begin() -> None:
            if (k := next(batches, None)) is not None:
                begun.append(self.sampler.reads(epoch, k))
                pool.begin(epoch, np.concatenate([indices for indices, _ in begun[-1]]))

        try:
            for _ in range(self.prefetch):
                begin()
            while begun:
                inputs, targets = pool.finish()
                micro_batches, row = [], 0
                for indices, count in begun.popleft():
                    rows = slice(row, row := row + len(indices))
                    micro_batches.append((inputs[rows], targets[rows], count))
                begin()
                yield micro_batches
        finally:
            if pool.busy:
                pool.end()

    def _idle_pool(self, epoch: int, index: int) -> WorkerPool:
        """The pool, made now if there is none at rest; `index` is a sample that it will read."""
        if self._pool is None or self._pool.busy or self._pool.ended:
            self.close()
            self._pool = WorkerPool(self.dataset, self.sampler.seed, self.timeout)
            self._pool.start(self.workers, self.sampler.rows, self.prefetch + 1, sample=(epoch, index))
        return self._pool

    def close(self) -> None:
        """End the workers; the next read forks new ones."""
        if self._pool is not None:
            self._pool.end()
            self._pool = None


class WorkerError(Exception):
    """A worker's own traceback: the cause of the DataError raised in its stead."""


class WorkerPool:
    """Processes that read samples of `dataset` under (seed, epoch, index) into slots of shared memory."""

    def __init__(self, dataset: Dataset, seed: int, timeout: float):
        self.dataset, self.seed, self.timeout = dataset, seed, timeout
        self._workers: list[Worker] = []
        self._under_way: deque[tuple[int, int, deque[int]]] = deque()  # epoch, slot, whose rows are awaited
        self._begun = 0

    @property
    def busy(self) -> bool:
        """Whether a batch is under way."""
        return bool(self._under_way)

    @property
    def ended(self) -> bool:
        """Whether there is nobody to do the work: before `start` and after `end`."""
        return not self._workers

    def start(self, workers: int, rows: int, slots: int, sample: tuple[int, int]) -> None:
        """Look at one sample, given as (epoch, index); make a buffer that fits its like; fork the workers."""
        try:
            self._buffer = SharedBuffer(self._look(*sample), rows, slots)
            serve = fill_main(self.dataset, self.seed, self._buffer)
            for _ in range(workers):
                self._workers.append(Worker(serve))
        except BaseException:
            self.end()
            raise

    def _look(self, epoch: int, index: int) -> SampleSpec:
        """The layout of a sample, read in a process of its own.

        Were it read here, a file that the data set opens at its first sample would be inherited by all workers,
        which would then share, and spoil, one position in it.
        """
        self._workers.append(Worker(spec_main(self.dataset, self.seed, index)))
        self._workers[0].send(command(epoch, 0, 0, 1))
        parts = self._receive(0, epoch)["layout"]
        self.end()
        return SampleSpec(*(ArraySpec(dtype, tuple(shape)) for dtype, shape in parts))

    def begin(self, epoch: int, indices: Indices) -> None:
        """Have the next slot filled with these samples; the cuts go round, so that each worker gets its turn."""
        slot, workers = self._begun % len(self._buffer.slots), len(self._workers)
        self._buffer.slots[slot].indices[: len(indices)] = indices
        who: deque[int] = deque()
        for part in range(workers):
            first, stop = cut(len(indices), part, workers)
            if first < stop:
                who.append((part + self._begun) % workers)
                self._workers[who[-1]].send(command(epoch, slot, first, stop))
        self._under_way.append((epoch, slot, who))
        self._begun += 1

    def finish(self) -> tuple[Array, Array]:
        """Inputs and targets of the slot that was begun first, once all its rows are there."""
        if self.ended:
            raise RuntimeError("this reading was ended: by a newer one, or by the loader's close()")
        epoch, slot, who = self._under_way[0]
        while who:
            self._receive(who[0], epoch)
            who.popleft()
        self._under_way.popleft()
        return self._buffer.slots[slot].inputs, self._buffer.slots[slot].targets

    def end(self) -> None:
        """End all workers at once, whatever they are doing."""
        while self._workers:
            self._workers.pop().end()
        self._under_way.clear()

    def _receive(self, number: int, epoch: int) -> Reply:
        """The worker's next reply; a DataError that says who failed, at which sample and how, if it did."""
        worker = self._workers[number]
        try:
            reply = worker.receive(self.timeout)
        except WorkerHungError:
            patience = f"stood still for {self.timeout:g} s (the loader's time-out for one sample)"
            raise DataError(f"{self._who(number, epoch)} {patience}; it was ended") from None
        except WorkerEndedError as error:
            raise DataError(f"{self._who(number, epoch)} {error}") from None
        if "error" in reply:
            raise DataError(reply["error"]) from WorkerError("\n" + reply["traceback"])
        return reply

    def _who(self, number: int, epoch: int) -> str:
        worker = self._workers[number]
        begun, index = worker.progress.tolist()
        at = f"at {name(self.dataset, index)} of epoch {epoch}" if begun else "before its first sample"
        return f"data worker {number} (process {worker.pid}), {at},"


_COMMAND = struct.Struct("<qqqq")


def command(epoch: int, slot: int, first: int, stop: int) -> bytes:
    """«Fill rows `first` to `stop` of `slot` with the samples whose indices stand there, as of `epoch`»."""
    return _COMMAND.pack(epoch, slot, first, stop)


def spec_main(dataset: Dataset, seed: int, index: int) -> WorkerMain:
    """Answers any command with the layout of sample `index`."""

    def look(epoch: int, slot: int, first: int, stop: int, progress: Progress) -> Reply:
        progress[:] = 1, index
        inputs, targets = read_samples(dataset, np.array([index]), seed, epoch)
        layout = SampleSpec.of((inputs[0], targets[0]))
        parts = (layout.input, layout.target)
        return {"layout": [[part.dtype, part.shape] for part in parts]}

    return _answering(look)


def fill_main(dataset: Dataset, seed: int, buffer: SharedBuffer) -> WorkerMain:
    """Answers each command when the rows it names are filled."""
    fill_rows = _fill_taken if is_stacked(dataset) else _fill_one_by_one

    def fill(epoch: int, slot: int, first: int, stop: int, progress: Progress) -> Reply:
        rows = Slot(*(array[first:stop] for array in buffer.slots[slot]))
        fill_rows(dataset, (seed, epoch), rows, buffer.layout, progress)
        return {}

    return _answering(fill)


def _fill_taken(
    dataset: Dataset, _key: tuple[int, int], rows: Slot, layout: SampleSpec, progress: Progress
) -> None:
    progress[:] = progress[0] + 1, rows.indices[0]
    inputs, targets = take(dataset, rows.indices)
    _check(dataset, int(rows.indices[0]), layout, (inputs[0], targets[0]))
    rows.inputs[:], rows.targets[:] = inputs, targets


def _fill_one_by_one(
    dataset: Dataset, key: tuple[int, int], rows: Slot, layout: SampleSpec, progress: Progress
) -> None:
    for row, index in enumerate(rows.indices.tolist()):
        progress[:] = progress[0] + 1, index
        seed_sample(*key, index)
        pair = read_sample(dataset, index)
        _check(dataset, index, layout, pair)
        rows.inputs[row], rows.targets[row] = pair


def _check(dataset: Dataset, index: int, layout: SampleSpec, pair: tuple[np.ndarray, np.ndarray]) -> None:
    if difference := layout.difference(pair):
        raise DataError(f"{name(dataset, index)} is {difference} as others: they cannot be one batch")


def _answering(do: Callable[[int, int, int, int, Progress], Reply]) -> WorkerMain:
    """Do each command as it comes; a failure is an answer too."""

    def serve(commands: BinaryIO, tell: Answer, progress: Progress) -> None:
        _stay_on_cpu()
        while len(words := commands.read(_COMMAND.size)) == _COMMAND.size:
            try:
                epoch, slot, first, stop = _COMMAND.unpack(words)
                reply = do(epoch, slot, first, stop, progress)
            except Exception as error:  # noqa: BLE001 - it is told to the parent, which raises it
                reply = {"error": str(error), "traceback": traceback.format_exc()}
            tell(reply)

    return serve


def _stay_on_cpu() -> None:
    """A forked process cannot use its parent's GPU: a tensor that a transform makes is to be made on the CPU."""
    if "paddle" in sys.modules:
        sys.modules["paddle"].set_device("cpu")
