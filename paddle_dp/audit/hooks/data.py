"""Records which samples a rank reads: the batches of each pass over a DataLoader, in the parent process.

The sampler is read to its end when a pass begins, so the indices of the whole epoch are known, although the script
reads only its first batches and its last one.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import paddle
from paddle.io import DataLoader, IterableDataset
from paddle.io.dataloader.dataloader_iter import _DataLoaderIterBase

from paddle_dp.audit.events import Batches, Fetched, LoaderCreated, PassBegan
from paddle_dp.audit.hooks import generators
from paddle_dp.audit.hooks.arrays import crc, flatten
from paddle_dp.audit.hooks.source_line import called_by, caller, here
from paddle_dp.audit.hooks.watch import EPOCHS, ReadBatch, ScriptMonitor, wrap

MAX_PASSES = 4  # a sampler that gives more batches than this many data set lengths counts as endless


class BatchOrder:
    """The batches of indices of one pass, read ahead from the sampler; or the single batch `only`."""

    def __init__(self, only: list[Any] | None = None):
        self.only, self.batches, self.drew = only, None, ()  # type: tuple[Any, Batches | None, tuple[str, ...]]
        self.states: dict[str, str] = {}

    def read(self, sampler: Iterable[Any], loader: DataLoader) -> Iterable[Any]:
        if self.only is not None:
            return [self.only]
        if isinstance(loader.dataset, IterableDataset):
            self.states = generators.states()
            return sampler
        before, source = generators.states(), iter(sampler)
        bound = MAX_PASSES * len(loader.dataset) + 1
        read = list(itertools.islice(source, bound))
        self.states = generators.states()
        self.drew = generators.moved(before, self.states)
        self.batches = _integers(read) if len(read) < bound else None
        return itertools.chain(read, source)


def _integers(batches: list[Any]) -> Batches | None:
    """Batches of indices as integers; None if the sampler gives something else."""
    try:
        return tuple(tuple(map(int, batch if np.ndim(batch) else [batch])) for batch in batches)
    except (TypeError, ValueError):
        return None


class Loaders:
    """This rank's DataLoaders, numbered by creation; a line that makes one again keeps its number."""

    def __init__(self, watch: ScriptMonitor):
        self.watch = watch
        self.numbers: WeakKeyDictionary[DataLoader, int] = WeakKeyDictionary()
        self.by_line: dict[tuple[str, ...], list[tuple[int, Any]]] = {}  # numbers and data sets
        self.passes: dict[int, int] = {}
        self.training: dict[int, int] = {}  # by loader, the number of passes with updates
        self.order: tuple[BatchOrder, DataLoader] | None = None
        self.iterate: Callable[[DataLoader], Iterator[Any]] = DataLoader.__iter__

    def install(self) -> None:
        loaders, indices = self, _DataLoaderIterBase._index_sampler.fget

        def init(original: Callable[..., None], loader: DataLoader, *args: Any, **kwargs: Any) -> None:
            original(loader, *args, **kwargs)
            loaders.add(loader)

        def index_sampler(iterator: Any) -> Any:
            sampler = indices(iterator)
            if loaders.order is None:
                return sampler
            order, loader = loaders.order
            loaders.order = None
            return order.read(sampler, loader)

        wrap(DataLoader, "__init__", init)
        DataLoader.__iter__ = lambda loader: Pass(loaders, loader)
        DataLoader.__call__ = DataLoader.__iter__
        _DataLoaderIterBase._index_sampler = property(index_sampler)

    def add(self, loader: DataLoader) -> None:
        """Numbers a loader: like the same line's earlier one if that was read, else anew."""
        line, is_stream = here(), isinstance(loader.dataset, IterableDataset)
        samples = None if is_stream else len(loader.dataset)
        same_line = self.by_line.setdefault((line, caller(), type(loader.dataset).__name__, str(samples)), [])
        for number, dataset in same_line:
            if dataset is loader.dataset or self.passes[number]:
                self.numbers[loader] = number
                return
        number = self.numbers[loader] = len(self.passes)
        same_line.append((number, loader.dataset))
        self.passes[number] = 0
        sampler = loader.batch_sampler
        self.watch.journal.write(LoaderCreated(
            loader=number, samples=samples, dataset=type(loader.dataset).__name__,
            sampler=type(sampler).__name__ if sampler is not None else "",
            batch_size=getattr(sampler, "batch_size", None), drop_last=bool(getattr(sampler, "drop_last", False)),
            workers=loader.num_workers, where=line,
        ))  # fmt: skip

    def open(self, loader: DataLoader, order: BatchOrder) -> Iterator[Any]:
        """Paddle's own iterator over `loader`, in this order."""
        self.order = (order, loader)
        try:
            return self.iterate(loader)
        finally:
            self.order = None


class Pass:
    """One iteration over a loader, cut short after enough batches: then its last batch follows, and it ends."""

    def __init__(self, loaders: Loaders, loader: DataLoader):
        self.watch, self.loaders, self.loader = loaders.watch, loaders, loader
        self.watch.check()
        if loader not in loaders.numbers:  # a copy, or of a subclass that does not call __init__
            loaders.add(loader)
        self.loader_number = loaders.numbers[loader]
        if loaders.training.get(self.loader_number, 0) >= EPOCHS:
            self.watch.stop()
        loaders.passes[self.loader_number] += 1
        self.number = loaders.passes[self.loader_number]
        self.steps, self.gradients, self.yielded = self.watch.done, self.watch.gradients, 0
        order = BatchOrder()
        self.inner = loaders.open(loader, order)
        self.batches, self.last, self.over = order.batches, False, False
        # Without workers, a thread of this process has begun to read and draw; with workers, one draw seeds them.
        self.states = generators.states() if loader.num_workers else order.states
        self.watch.journal.write(PassBegan(
            loader=self.loader_number, number=self.number, batches=order.batches, drew=order.drew, where=here(),
            managed=called_by("paddle/hapi/model.py"),
        ))  # fmt: skip

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> Any:
        self.watch.check()
        if self.over or (self._has_enough and not self._go_to_last()):
            self._end()
            raise StopIteration
        try:
            data = next(self.inner)
        except StopIteration:
            self._end()
            raise
        self._note(data)
        return data

    @property
    def _has_enough(self) -> bool:
        """Whether this pass had enough updates, or, in an evaluation, enough batches without a gradient."""
        evaluates, enough = self.watch.gradients == self.gradients, self.watch.steps
        return self.watch.done - self.steps >= enough or (evaluates and self.yielded >= enough)

    def _go_to_last(self) -> bool:
        """Makes the pass's last batch the next one; False if it was read already, or is unknown."""
        if self.last or self.batches is None or self.yielded >= len(self.batches):
            return False
        self.last = True
        if self.yielded < len(self.batches) - 1:
            alone = copy.copy(self.loader)
            alone.num_workers = 0
            self.inner = self.loaders.open(alone, BatchOrder(only=list(self.batches[-1])))
            self.yielded = len(self.batches) - 1
        return True

    def _note(self, data: Any) -> None:
        watch, index = self.watch, self.yielded
        self.yielded += 1
        states = generators.states()
        drew, self.states = generators.moved(self.states, states), states
        if not watch.window:
            watch.states_at_window = states["paddle"]
        watch.window.append(ReadBatch(self.loader_number, self.number, index, data))
        if self.batches and index == len(self.batches) - 1 and self.number == 1:
            watch.record_next = True
        known = self.batches is not None and index < len(self.batches)
        watch.journal.write(Fetched(
            loader=self.loader_number, number=self.number, index=index,
            size=len(self.batches[index]) if known and self.batches else size(data),
            rows=() if known else rows(data), drew=drew, states=states, where=here(),
        ))  # fmt: skip

    def _end(self) -> None:
        if self.over:
            return
        self.over = True
        if self.watch.gradients == self.gradients:
            self.watch.forget(self.loader_number, self.number)
        if self.watch.done > self.steps:
            self.loaders.training[self.loader_number] = self.loaders.training.get(self.loader_number, 0) + 1


def size(data: Any) -> int:
    """The number of samples of a batch: the first dim of its first tensor; 0 if there is none."""
    _, leaves = flatten(data)
    return int(leaves[0].shape[0]) if leaves and len(leaves[0].shape) else 0


def rows(data: Any) -> tuple[str, ...]:
    """A digest of each sample of a batch, over all its tensors that have one row per sample."""
    count, (_, leaves) = size(data), flatten(data)
    arrays = [leaf.numpy() if isinstance(leaf, paddle.Tensor) else np.asarray(leaf) for leaf in leaves]
    per_sample = [array for array in arrays if array.ndim and len(array) == count]
    contents = (
        b"".join(np.ascontiguousarray(array[row]).tobytes() for array in per_sample) for row in range(count)
    )
    return tuple(map(crc, contents))
