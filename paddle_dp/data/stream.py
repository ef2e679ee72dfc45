"""Streams as data sets: sample i is the i-th that iterating yields, on any number of ranks and workers.

Every reader iterates the whole stream and keeps its samples. So ranks need not exchange its end, and a resume needs
only the number of earlier samples. Reading forward is cheap; going back restarts the stream.
"""

from __future__ import annotations

import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paddle_dp.data.randomness import restoring_globals, seed_sample
from paddle_dp.errors import DataError, UsageError

QUIET_SECONDS = 2.0  # seconds of counting, after which a line is printed
MORE = "Let it give as many in each epoch; or set loader.samples to the samples of one epoch of the training."
LARGEST = 10**8  # samples that are counted; a longer stream probably has no end


@runtime_checkable
class OfEpoch(Protocol):
    """A stream that differs between epochs."""

    def set_epoch(self, epoch: int, /) -> None:
        """Is called before the stream is iterated for an epoch."""


def has_method(source: Any, method: str) -> bool:
    """Whether a data set or a stream itself gives samples by this method. A wrapper with a `__getattr__` may have
    the method of the data within it, which gives other samples; a class may take a method back, with None."""
    is_direct = method in getattr(source, "__dict__", ()) or hasattr(type(source), method)
    return is_direct and callable(getattr(source, method, None))


class Once:
    """An iterator that can be read only once. Samples read before `begin` are kept and yielded again."""

    def __init__(self, iterator: Iterator[Any]):
        self._iterator, self._buffer, self._passed, self._begun = iterator, deque[Any](), 0, False

    def begin(self) -> None:
        """Stops keeping samples: each is yielded once from now on."""
        self._begun = True

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[Any]:
        """Yields the samples from `position` on. Raises DataError for samples that are gone."""
        if position < self._passed:
            raise DataError(
                f"this stream can be read only once, and its first {self._passed} samples have been: let it be "
                "made anew for each epoch, or train one epoch at most"
            )
        cursor = self._passed
        while True:
            if cursor - self._passed == len(self._buffer):
                try:
                    self._buffer.append(next(self._iterator))
                except StopIteration:
                    return
            sample = self._buffer[cursor - self._passed]
            cursor += 1
            if self._begun:
                while self._passed < cursor:
                    self._buffer.popleft()
                    self._passed += 1
            if cursor > position:
                yield sample


class Stream:
    """`source` as a data set of `samples` samples, read in order even if they are requested in another.

    Every sample is seeded separately, as in any data set; so are the samples that are skipped.
    """

    def __init__(
        self,
        source: Any,
        samples: int,
        each: Callable[[Any], Any] | None = None,
        length_source: str | None = None,
    ):
        """`each` is applied to a sample that is read, such as padding. `length_source`: `samples` is the stream's whole
        length; the text gives the origin of that number, for the error if the stream has more."""
        self.source, self.each, self._samples, self._length_source = source, each, samples, length_source
        self._key: tuple[int, int, int] | None = None  # process, seed and epoch of the iterator
        self._iterator: Iterator[Any] = iter(())
        self._next = 0  # the index of the iterator's next sample
        self._last: Any = None  # the previous sample
        self._seed_and_epoch = (0, 0)

    def at_epoch(self, seed: int, epoch: int) -> Stream:
        """Returns this stream; from now on `stream[i]` belongs to this epoch."""
        self._seed_and_epoch = seed, epoch
        return self

    def then(self, do: Callable[[Any], Any]) -> Stream:
        """A stream that also applies `do` to each sample, last."""
        before = self.each
        both = do if before is None else lambda sample: do(before(sample))
        return Stream(self.source, self._samples, both, self._length_source)

    @property
    def is_once(self) -> bool:
        """True if it can be read only once."""
        return isinstance(self.source, Once)

    def begin(self) -> None:
        """Is called when training begins to read."""
        if isinstance(self.source, Once):
            self.source.begin()
            self.forget()

    def forget(self) -> None:
        """Restarts the stream at the next sample that is read."""
        self._key = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        """Raises DataError if the stream ends too early, IndexError for an index out of range."""
        if not 0 <= index < self._samples:
            raise IndexError(f"{index} is not one of {self._samples} samples")
        seed, epoch = self._seed_and_epoch
        key = os.getpid(), seed, epoch  # a forked worker must not share its parent's connections
        if key != self._key or index < self._next - 1:
            self._begin(key, index)
        while self._next <= index:
            seed_sample(seed, epoch, self._next)
            self._key = None  # a stream that has failed is restarted
            try:
                self._last = next(self._iterator)
            except StopIteration:
                raise DataError(
                    f"the stream ended after {self._next} samples of epoch {epoch}, and {self._samples} were expected: "
                    "let it give as many in each epoch, or set loader.samples to a number that it always has"
                ) from None
            self._key = key
            self._next += 1
            if self._next == self._samples and self._length_source:
                self._check_end(self._length_source, epoch)
        return self._last if self.each is None else self.each(self._last)

    def _check_end(self, length_source: str, epoch: int) -> None:
        """Raises DataError if the stream has another sample, which would silently never be read."""
        seed_sample(self._seed_and_epoch[0], epoch, self._next)
        try:
            next(self._iterator)
        except StopIteration:
            return
        self._key = None
        raise DataError(
            f"the stream has more than {self._samples} samples in epoch {epoch}, and the others would never be read: "
            f"{length_source}. {MORE}"
        )

    def _begin(self, key: tuple[int, int, int], index: int) -> None:
        self._key, self._next = None, 0
        seed_sample(key[1], key[2], -1)  # a stream may draw its order here, before its first sample
        if isinstance(self.source, OfEpoch):
            self.source.set_epoch(key[2])
        if has_method(self.source, "iterate_from"):  # a stream that can start in the middle
            self._iterator, self._next = iter(self.source.iterate_from(index)), index
        else:
            self._iterator = iter(self.source)
        self._key = key


@dataclass
class FreshIterable:
    """An iterable that calls `make` each time it is iterated."""

    make: Callable[[], Any]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


class FreshOfEpoch(FreshIterable):
    """A FreshIterable whose iterators differ between epochs (`OfEpoch`)."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        iterator = self.make()
        iterator.set_epoch(self.epoch)
        return iter(iterator)


def as_dataset(
    source: Any,
    samples: int | None,
    name: str,
    recreate: Callable[[], Any] | None = None,
    once: bool | None = False,
) -> Any:
    """Wraps a stream as a Stream; a data set is returned as it is.

    A stream is a paddle.io.IterableDataset, an object with `__iter__` alone, or a generator function. It has `samples`
    samples; if that is None, they are counted. `name` is its name in messages. `recreate` makes a new iterator, because
    one can be read only once; `once`: a single process reads it, once; None: nothing does. Raises UsageError for an
    iterator with neither, for one to be read once without `samples`, for an endless stream without `samples`, for a
    data set without len(), and for a loader.
    """
    is_loader = hasattr(source, "batch_sampler") and hasattr(source, "dataset")
    if is_loader and not hasattr(source, "__getitem__"):  # Paddle's or PyTorch's DataLoader
        raise UsageError(
            f"{name}: a {type(source).__name__} makes batches, which would count as samples. Give its data set "
            f"({type(source.dataset).__name__}) and the global batch size: ranks share the batches by themselves."
        )
    if not is_stream(source):
        _require_length(source, name)
        return source
    if inspect.isgeneratorfunction(source):
        source = FreshIterable(source)
    if isinstance(source, Iterator) and recreate is not None:
        source = (FreshOfEpoch if isinstance(source, OfEpoch) else FreshIterable)(recreate)
    if isinstance(source, Iterator) and once:
        if not samples:
            raise UsageError(
                f"{name}: {type(source).__name__} can be read only once, so its samples cannot be counted: set "
                "loader.samples to the number that is to be read."
            )
        source = Once(source)
    if isinstance(source, Iterator):
        remedy = "" if once is None else "; or let rank 0 alone read it, for one epoch: reading='scatter'"
        raise UsageError(
            f"{name}: {type(source).__name__} can be read only once, and is read in every "
            f"{'evaluation' if once is None else 'epoch, by every worker'}. Give the function that makes it, or an "
            f"object whose __iter__ does{remedy}."
        )
    if samples:
        return Stream(source, samples)
    if length := _length(source):
        return Stream(source, length, length_source=f"its len() is {length}")
    counted = _counted(source, name)
    return Stream(source, counted, length_source=f"{counted} were counted, in epoch 0")


def is_stream(source: Any) -> bool:
    """True for a source that can only be iterated, and for a generator function."""
    from paddle.io import IterableDataset

    if isinstance(source, IterableDataset) or inspect.isgeneratorfunction(source):
        return True
    return isinstance(source, Iterable) and not hasattr(source, "__getitem__")


def _require_length(source: Any, name: str) -> None:
    """Raises UsageError for a data set, other than None, whose samples `len` does not count, and for its word."""
    if isinstance(source, str) or (isinstance(source, Mapping) and "use" in source):
        raise UsageError(
            f"{name}: {source!r} is no data set. Give the object itself, with len(d) and d[i] → (input, target)."
        )
    try:
        if source is not None:
            len(source)
    except (TypeError, NotImplementedError) as error:  # Paddle's Dataset raises the second
        raise UsageError(
            f"{name}: {error}. A data set has a method __len__, the number of its samples, and __getitem__; an "
            "object that can only be iterated has __iter__ alone."
        ) from error


def _length(source: Any) -> int:
    """The source's len(), or 0 if it has none."""
    try:
        return len(source)
    except (TypeError, RuntimeError):  # Paddle's IterableDataset raises the second
        return 0


def _counted(source: Any, name: str) -> int:
    count, began = 0, time.monotonic()
    with restoring_globals():
        if isinstance(source, OfEpoch):
            source.set_epoch(0)
        try:
            for count, _ in enumerate(source, start=1):
                if count > LARGEST:
                    break
        except Exception as error:
            raise DataError(f"{name}: sample {count}: {type(error).__name__}: {error}") from error
    if count > LARGEST:
        raise UsageError(
            f"{name}: the stream has more than {LARGEST:,} samples, or no end. Set loader.samples to the samples of an "
            "epoch."
        )
    if (took := time.monotonic() - began) > QUIET_SECONDS:
        saves = f"(loader.samples={count} saves that)"
        print(f"{name}: counted the stream's {count} samples in {took:.0f} s {saves}", flush=True)
    return count
