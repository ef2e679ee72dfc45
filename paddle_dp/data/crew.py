"""The workers of one loader: they share a ring, and fill a slot of it together, each its cut of the rows."""

from __future__ import annotations

from collections import deque

from paddle_dp.data.child import Child, ChildEndedError, ChildHungError, Reply
from paddle_dp.data.ring import Layout, Like, Ring
from paddle_dp.data.sample import Array, Dataset, name
from paddle_dp.data.sampler import Indices, cut
from paddle_dp.data.serve import command, filling, looking
from paddle_dp.errors import DataError


class WorkerError(Exception):
    """A worker's own traceback: the cause of the DataError raised in its stead."""


class Crew:
    """Processes that read samples of `dataset` under (seed, epoch, index) into slots of shared memory."""

    def __init__(self, dataset: Dataset, seed: int, timeout: float):
        self.dataset, self.seed, self.timeout = dataset, seed, timeout
        self._children: list[Child] = []
        self._under_way: deque[tuple[int, int, deque[int]]] = deque()  # epoch, slot, whose rows are awaited
        self._begun = 0

    @property
    def busy(self) -> bool:
        """Whether a batch is under way."""
        return bool(self._under_way)

    @property
    def ended(self) -> bool:
        """Whether there is nobody to do the work: before `start` and after `end`."""
        return not self._children

    def start(self, workers: int, rows: int, slots: int, sample: tuple[int, int]) -> None:
        """Look at one sample, given as (epoch, index); make a ring that fits its like; fork the workers."""
        try:
            self._ring = Ring(self._look(*sample), rows, slots)
            serve = filling(self.dataset, self.seed, self._ring)
            for _ in range(workers):
                self._children.append(Child(serve))
        except BaseException:
            self.end()
            raise

    def _look(self, epoch: int, index: int) -> Layout:
        """The layout of a sample, read in a process of its own.

        Were it read here, a file that the data set opens at its first sample would be inherited by all workers,
        which would then share, and spoil, one position in it.
        """
        self._children.append(Child(looking(self.dataset, self.seed, index)))
        self._children[0].send(command(epoch, 0, 0, 1))
        parts = self._receive(0, epoch)["layout"]
        self.end()
        return Layout(*(Like(dtype, tuple(shape)) for dtype, shape in parts))

    def begin(self, epoch: int, indices: Indices) -> None:
        """Have the next slot filled with these samples; the cuts go round, so that each worker gets its turn."""
        slot, workers = self._begun % len(self._ring.slots), len(self._children)
        self._ring.slots[slot].indices[: len(indices)] = indices
        who: deque[int] = deque()
        for part in range(workers):
            first, stop = cut(len(indices), part, workers)
            if first < stop:
                who.append((part + self._begun) % workers)
                self._children[who[-1]].send(command(epoch, slot, first, stop))
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
        return self._ring.slots[slot].inputs, self._ring.slots[slot].targets

    def end(self) -> None:
        """End all workers at once, whatever they are doing."""
        while self._children:
            self._children.pop().end()
        self._under_way.clear()

    def _receive(self, worker: int, epoch: int) -> Reply:
        """The worker's next reply; a DataError that says who failed, at which sample and how, if it did."""
        child = self._children[worker]
        try:
            reply = child.receive(self.timeout)
        except ChildHungError:
            patience = f"stood still for {self.timeout:g} s (the loader's time-out for one sample)"
            raise DataError(f"{self._who(worker, epoch)} {patience}; it was ended") from None
        except ChildEndedError as error:
            raise DataError(f"{self._who(worker, epoch)} {error}") from None
        if "error" in reply:
            raise DataError(reply["error"]) from WorkerError("\n" + reply["traceback"])
        return reply

    def _who(self, worker: int, epoch: int) -> str:
        child = self._children[worker]
        begun, index = child.progress.tolist()
        at = f"at {name(self.dataset, index)} of epoch {epoch}" if begun else "before its first sample"
        return f"data worker {worker} (process {child.pid}), {at},"
