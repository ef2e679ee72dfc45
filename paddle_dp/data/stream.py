"""Streams as data sets: sample i is the i-th that iterating gives, on any number of ranks and workers.

Every reader iterates the whole stream and keeps what is its own, so that the ranks need no word on where it ends, and a
resume needs nothing but the number of samples before it. Reading on is cheap; going back begins the stream again.
"""

from __future__ import annotations

import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from paddle_dp.data.randomness import restoring_globals, seed_sample
from paddle_dp.errors import DataError, UsageError

QUIET_SECONDS = 2.0  # seconds of counting after which it is said
MORE = "Let it give as many in each epoch; or set loader.samples to what an epoch of the training is to have."
LARGEST = 10**8  # samples that are counted; a longer stream probably has no end


@runtime_checkable
class OfEpoch(Protocol):
    """A stream that is another one in each epoch."""

    def set_epoch(self, epoch: int, /) -> None:
        """Called before it is iterated for an epoch."""


@runtime_checkable
class FromPosition(Protocol):
    """A stream that can begin in the middle."""

    def iterate_from(self, position: int, /) -> Iterator[Any]:
        """Its samples from `position` on."""
        ...


class Once:
    """An iterator that can be read only once. Samples that are looked at before `begin` are kept, and given again."""

    def __init__(self, iterator: Iterator[Any]):
        self._iterator, self._buffer, self._passed, self._begun = iterator, deque[Any](), 0, False

    def begin(self) -> None:
        """From now on each sample is given once."""
        self._begun = True

    def __iter__(self) -> Iterator[Any]:
        return self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[Any]:
        """Its samples from `position` on. Raises DataError for what it has given already."""
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
    """`source` as a data set of `samples` samples, which are read in order; also where they are asked for in another.

    A sample is read with random numbers of its own, as of any data set, and so are those that are passed over.
    """

    def __init__(
        self,
        source: Any,
        samples: int,
        each: Callable[[Any], Any] | None = None,
        length_source: str | None = None,
    ):
        """`each` is what is done to a sample that is read, such as padding. `length_source`: the samples are all that
        it has; who said so, for the message where it has more."""
        self.source, self.each, self._samples, self._length_source = source, each, samples, length_source
        self._key: tuple[int, int, int] | None = None  # process, seed and epoch of the iterator
        self._iterator: Iterator[Any] = iter(())
        self._next = 0  # the index of the sample that it gives next
        self._last: Any = None  # the sample before
        self._seed_and_epoch = (0, 0)  # seed and epoch

    def at_epoch(self, seed: int, epoch: int) -> Stream:
        """This one; from now on `stream[i]` is of this epoch."""
        self._seed_and_epoch = seed, epoch
        return self

    def then(self, do: Callable[[Any], Any]) -> Stream:
        """This one with `do` done to each sample, after what is done already."""
        before = self.each
        both = do if before is None else lambda sample: do(before(sample))
        return Stream(self.source, self._samples, both, self._length_source)

    @property
    def is_once(self) -> bool:
        """Whether it can be read only once."""
        return isinstance(self.source, Once)

    def begin(self) -> None:
        """The training begins to read."""
        if isinstance(self.source, Once):
            self.source.begin()
            self.forget()

    def forget(self) -> None:
        """The next sample is read from the stream's beginning, whichever it is."""
        self._key = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        """Raises DataError where the stream ends before it, and IndexError for what is none of its samples."""
        if not 0 <= index < self._samples:
            raise IndexError(f"{index} is not one of {self._samples} samples")
        seed, epoch = self._seed_and_epoch
        key = os.getpid(), seed, epoch  # a forked worker must not go on with its parent's files
        if key != self._key or index < self._next - 1:
            self._begin(key, index)
        while self._next <= index:
            seed_sample(seed, epoch, self._next)
            self._key = None  # unless it gives one: what has failed is begun anew
            try:
                self._last = next(self._iterator)
            except StopIteration:
                raise DataError(
                    f"the stream ended after {self._next} samples of epoch {epoch}, and {self._samples} were to come: "
                    "let it give as many in each epoch, or set loader.samples to a number that it always has"
                ) from None
            self._key = key
            self._next += 1
            if self._next == self._samples and self._length_source:
                self._check_end(self._length_source, epoch)
        return self._last if self.each is None else self.each(self._last)

    def _check_end(self, length_source: str, epoch: int) -> None:
        """Raises DataError if there is a sample more: it would never be read, and nobody be told."""
        seed_sample(self._seed_and_epoch[0], epoch, self._next)
        try:
            next(self._iterator)
        except StopIteration:
            return
        self._key = None
        raise DataError(
            f"the stream has more than {self._samples} samples in epoch {epoch}, and the rest would never be read: "
            f"{length_source}. {MORE}"
        )

    def _begin(self, key: tuple[int, int, int], index: int) -> None:
        self._key, self._next = None, 0
        if isinstance(self.source, OfEpoch):
            self.source.set_epoch(key[2])
        if isinstance(self.source, FromPosition):
            self._iterator, self._next = iter(self.source.iterate_from(index)), index
        else:
            self._iterator = iter(self.source)
        self._key = key


@dataclass(frozen=True)
class FreshIterable:
    """What `make` makes, anew for each time that it is iterated."""

    make: Callable[[], Iterable[Any]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.make())


def as_dataset(
    source: Any, samples: int | None, name: str, recreate: Callable[[], Any] | None = None, once: bool = False
) -> Any:
    """A data set as it is; a stream, such as a paddle.io.IterableDataset, an object with `__iter__` alone, or a
    function that makes a generator, as a Stream of `samples` samples, or of as many as it has, which are counted.

    `name` is its name in messages. `recreate` makes it once more, for an iterator, which can be read only once;
    `once`: one process reads it, and may do so once. Raises UsageError for an iterator without either, for one of which
    `samples` is not known, and for a stream without an end where `samples` is None.
    """
    if not is_stream(source):
        return source
    if inspect.isgeneratorfunction(source):
        source = FreshIterable(source)
    if isinstance(source, Iterator) and recreate is not None:
        source = FreshIterable(recreate)
    if isinstance(source, Iterator) and once:
        if not samples:
            raise UsageError(
                f"{name}: {type(source).__name__} can be read only once, so its samples cannot be counted: set "
                "loader.samples to those that are to be read."
            )
        source = Once(source)
    if isinstance(source, Iterator):
        raise UsageError(
            f"{name}: {type(source).__name__} can be read only once, and is read in every epoch, by every worker. Give "
            "the function that makes it, or an object whose __iter__ does; or let rank 0 alone read it, for one epoch: "
            "reading='scatter'."
        )
    if samples:
        return Stream(source, samples)
    if length := _length(source):
        return Stream(source, length, length_source=f"its len() is {length}")
    counted = _counted(source, name)
    return Stream(source, counted, length_source=f"{counted} were counted, in epoch 0")


def is_stream(source: Any) -> bool:
    """Whether it can only be iterated; or is a function without arguments that makes a generator."""
    from paddle.io import IterableDataset

    if isinstance(source, IterableDataset) or inspect.isgeneratorfunction(source):
        return True
    return isinstance(source, Iterable) and not hasattr(source, "__getitem__")


def _length(source: Any) -> int:
    """What it says of itself; 0 where it does not."""
    try:
        return len(source)
    except (TypeError, RuntimeError):  # Paddle's IterableDataset raises the second
        return 0


def _counted(source: Any, name: str) -> int:
    count, began = 0, time.monotonic()
    with restoring_globals():
        if isinstance(source, OfEpoch):
            source.set_epoch(0)
        for _ in _with_sample_number(source, name):
            count += 1
            if count > LARGEST:
                raise UsageError(
                    f"{name}: the stream has more than {LARGEST:,} samples, or no end. Set loader.samples to the "
                    "samples of an epoch."
                )
    if (took := time.monotonic() - began) > QUIET_SECONDS:
        saves = f"(loader.samples={count} saves that)"
        print(f"{name}: counted the stream's {count} samples in {took:.0f} s {saves}", flush=True)
    return count


def _with_sample_number(source: Iterable[Any], name: str) -> Iterator[Any]:
    """Its samples. Raises DataError, with the number of the sample, for what it raises."""
    number = 0
    try:
        for number, sample in enumerate(source, start=1):  # noqa: B007 - it is for the message
            yield sample
    except Exception as error:
        raise DataError(f"{name}: sample {number}: {type(error).__name__}: {error}") from error
