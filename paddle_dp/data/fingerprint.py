"""Fingerprints of data sets, which show if two processes, or a run and its checkpoint, read the same data.

Reading everything would take as long as an epoch. So samples are read for a fraction of a second, spread evenly over
the data set; small data sets are read completely. For files, names and sizes are read, too, which is cheaper than
decoding.
"""

from __future__ import annotations

import math
import os
import statistics
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, BinaryIO

import numpy as np

from paddle_dp.batch import leaves
from paddle_dp.data.arrays import describe, rows_of
from paddle_dp.data.collate import neighbour_dependence
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import (
    Dataset,
    file_names,
    is_stacked,
    read_samples,
    read_seeded,
    take,
    uncollated_samples,
)
from paddle_dp.data.sampler import EpochOrders, is_ordered
from paddle_dp.data.stream import Stream
from paddle_dp.data.worker import Answer, Progress, Worker, WorkerEndedError, WorkerHungError
from paddle_dp.errors import DataError, UsageError

COLLATING = "collating"
FAULT = "fault"  # why ranks cannot share the samples
ORDER = "order of epoch 0"
UNREAD = "cannot be read"
RANDOM = "is another one each time it is read"
SECONDS = 0.2  # time for samples; names and sizes of files get another quarter of it
_PATIENCE = 5  # times SECONDS of this thread's processor time at most
_STALL = 50  # times SECONDS at most in all, on a busy machine
_COLLATED_SAMPLES = 8  # samples that are collated together, to test if a row depends on the others
_TAKE_SAMPLES = 16  # samples that are read by `take` and one by one, to test if both give the same
_TAKE_BYTES = 2**22  # bytes of samples per call of `take`

Indices = np.ndarray[Any, np.dtype[np.int64]]


def fingerprint(
    dataset: Dataset, seed: int, in_fork: bool = False, timeout: float = 120.0, seconds: float = SECONDS
) -> dict[str, str]:
    """{"sample 0": "inputs float32[1, 64] 1f0c2a77, targets int64[1] 7b21e4d0", …, "samples 12, 9, 6, 3": "0e11c5aa"}:
    a description of epoch 0.

    Four samples have dtype, shape and CRC-32. Then follow groups of samples, each half as large as all before it,
    until all are read or `seconds` are over; then names and sizes of files, "files 0, 8, 4, …" (if all lie in one
    folder, "flat files 0, …"). `COLLATING` describes how a collate_fn treats the first samples together,
    `FAULT` why ranks cannot share them.

    Equal data give equal text under each shared key; a slower process has fewer keys. The text of an unreadable sample
    gives the reason. Every sample is read twice; a group that differs gets the text `RANDOM` and is the last. `in_fork`
    reads in a fork: workers must not inherit a database opened at the first sample. Raises UsageError for a wrong
    setting.
    """
    return _read_in_fork(dataset, seed, timeout, seconds) if in_fork else _read(dataset, seed, seconds, False)


def common(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The keys of both, without samples that one of them found unreadable or random."""
    unknown = (UNREAD, RANDOM)
    return [
        key
        for key in first
        if key in other and not first[key].startswith(unknown) and not other[key].startswith(unknown)
    ]


def single_samples(read: Mapping[str, str]) -> dict[str, str]:
    """The texts of the single samples of a fingerprint, which every process reads, however slow."""
    return {key: text for key, text in read.items() if key.startswith("sample ")}


def order(samples: int) -> Iterator[Indices]:
    """Yields groups of indices that together cover every sample: four single ones, the first and the last among them,
    then four or more at a time, spread over the data set by steps of the golden section (Weyl's sequence).
    """
    for index in sorted({0, samples // 3, 2 * samples // 3, samples - 1}) if samples else []:
        yield np.array([index])
    least = max(1, round(samples * 0.618034))
    stride = next(n for n in range(least, 2 * samples + 2) if math.gcd(n, samples) == 1)
    done = 0
    while done < samples:
        more = min(max(4, done // 2), samples - done)
        # `start` uses Python integers, which do not overflow; the steps within a group fit into 64 bits.
        start, steps = done * stride % samples, np.arange(1, more + 1, dtype=np.int64)
        yield (start + steps * (stride % samples) % samples) % samples
        done += more


def in_order(samples: int) -> Iterator[Indices]:
    """Yields consecutive groups of indices that cover a stream, each as large as all before it."""
    done = 0
    while done < samples:
        more = 1 if done < 4 else min(done, samples - done)
        yield np.arange(done, done + more, dtype=np.int64)
        done += more


def _read(dataset: Dataset, seed: int, seconds: float, by_workers: bool) -> dict[str, str]:
    drawn, texts = _stated_order(dataset, seed)
    groups = in_order if isinstance(dataset, Stream) else order
    texts |= _walk(_drawn(groups, drawn), "samples", lambda which: _samples(dataset, seed, which), seconds)
    texts |= _collating(dataset, seed)
    if RANDOM not in texts.values() and len(dataset) > 1:
        texts |= _fault(dataset, seed, by_workers)
    file_of = file_names(dataset)
    if file_of is not None:
        root = _folder(file_of, _drawn(order, drawn))
        unit = "flat files" if root else "files"  # checkpoints of before have flat ones under the other key
        texts |= _walk(_drawn(order, drawn), unit, lambda which: _files(file_of, which, root), seconds / 4)
    return texts


def _stated_order(dataset: Dataset, seed: int) -> tuple[Indices | range, dict[str, str]]:
    """The indices of epoch 0 as the data set states them, and {ORDER: their CRC-32}; else all indices, {}."""
    everything = range(len(dataset))
    if not is_ordered(dataset):
        return everything, {}
    try:
        drawn = EpochOrders(dataset)(seed, 0)
    except DataError as error:
        return everything, {ORDER: f"{UNREAD}: {error}"}
    return drawn, {ORDER: _described(drawn)}


def _drawn(groups: Callable[[int], Iterator[Indices]], drawn: Indices | range) -> Iterator[Indices]:
    """The groups over the samples of an epoch, as indices: a mixture may draw few of all samples."""
    for positions in groups(len(drawn)):
        yield positions if isinstance(drawn, range) else drawn[positions]


def _collating(dataset: Dataset, seed: int) -> dict[str, str]:
    """{COLLATING: how the data set's collate_fn treats the first samples}; {} without a collate_fn."""
    indices = range(min(_COLLATED_SAMPLES, len(dataset)))
    try:
        with restoring_globals():
            samples = uncollated_samples(dataset, indices, seed, 0)
            if not samples:
                return {}
            dependence = neighbour_dependence(samples, seed)
            if samples[0].is_global_batch:
                batch = read_samples(dataset, np.array(indices), seed, 0)
                dependence = f"of whole batches: {_crc(batch, 0):08x}"
            if isinstance(dataset, Stream):
                dataset.forget()
            return {COLLATING: dependence or "of single samples"}
    except DataError as error:
        return {COLLATING: f"{UNREAD}: {error}"}


def _fault(dataset: Dataset, seed: int, by_workers: bool) -> dict[str, str]:
    """{FAULT: a sentence} if another read changes a sample that is kept to be stacked or collated with it, or if a
    sample depends on the others of a `take` or is another one without it; else {}. Workers (`by_workers`) copy each
    sample before the next."""
    other = 1 if isinstance(dataset, Stream) else len(dataset) - 1
    try:
        with restoring_globals():
            if is_stacked(dataset):
                alone = _copies(take(dataset, np.array([0])))
                among = _copies(rows_of(take(dataset, np.array([other, 0])), slice(1, 2)))
                return _take_differs(dataset, seed) if _close(alone, among) else {FAULT: _MIXED}
            buffered = _buffered(dataset, seed, 0, by_workers)
            before = _copies(buffered)
            _buffered(dataset, seed, other, by_workers)
            if isinstance(dataset, Stream):
                dataset.forget()
            return {} if _close(before, leaves(buffered)) else {FAULT: _REUSED}
    except Exception:  # noqa: BLE001 - the reader raises it; what a collate_fn gets need not be arrays
        return {}


def _take_differs(dataset: Dataset, seed: int) -> dict[str, str]:
    """{FAULT: a sentence} if samples that are read one by one are not the rows of `take`; else {}."""
    begun = time.monotonic()
    for index in dict.fromkeys(np.linspace(0, len(dataset) - 1, _TAKE_SAMPLES).astype(np.int64).tolist()):
        row = _copies(rows_of(take(dataset, np.array([index])), 0))
        if not _close(row, leaves(read_seeded(dataset, seed, 0, index))):
            return {FAULT: _UNUSED.format(index=index)}
        if time.monotonic() - begun > SECONDS:  # one of the readers is slow
            break
    return {}


def _buffered(dataset: Dataset, seed: int, index: int, by_workers: bool) -> Any:
    """What a reader holds of a sample while it reads the next."""
    raw = uncollated_samples(dataset, [index], seed, 0)
    if raw and raw[0].is_global_batch:
        return raw[0].sample
    return () if by_workers else read_seeded(dataset, seed, 0, index)


_REUSED = (
    "reading a sample changes the arrays of the one that was read before, so a batch would hold one sample several "
    "times: return a copy (array.copy()), not the same array each time"
)
_MIXED = (
    "the result of take for a sample, or its shape, depends on the other indices. A rank reads only its share of a "
    "batch, so that would be another batch on another number of ranks: let take give the rows that the data set gives "
    "one by one; where it pads to the longest, leave take out and set loader.pad"
)
_UNUSED = (
    "take gives other numbers for sample {index} than the data set one by one, and only take is used: without it, what "
    "a subclass's __getitem__ adds, such as augmentation, is never seen. Let them agree, or write take = None in the "
    "class"
)


def _copies(data: Any) -> list[Any]:
    return [np.array(leaf) for leaf in leaves(data)]


def _close(first: list[Any], other: list[Any]) -> bool:
    """Whether arrays are equal, but for their types, dims of one element and rounding."""
    return all(
        a.tobytes() == b.tobytes() or "V" in a.dtype.kind + b.dtype.kind or _equal(a.squeeze(), b.squeeze())
        for a, b in zip(first, map(np.asarray, other), strict=True)  # "V": bfloat16
    )


def _equal(a: Any, b: Any) -> bool:
    is_float = a.dtype.kind in "fc" and a.shape == b.shape
    return np.array_equal(a, b) or (is_float and np.allclose(a, b, 1e-3, 1e-5, equal_nan=True))


def _walk(
    groups: Iterator[Indices], unit: str, text_of: Callable[[Indices], str], seconds: float
) -> dict[str, str]:
    """Calls `text_of` for one group after another, while the next is likely to finish in time.

    The estimate uses the median group's time per sample, without waits for a processor: on a busy machine all groups
    may take many times as long, and a process may stand for a second. A small data set is read to its end all the same.
    """
    texts: dict[str, str] = {}
    began, cpu_began, done = time.perf_counter(), time.thread_time(), 0
    rates: list[float] = []
    for indices in groups:
        late = (
            time.thread_time() - cpu_began > _PATIENCE * seconds
            or time.perf_counter() - began > _STALL * seconds
        )
        begun = _clock()
        if done >= 4 and (late or statistics.median(rates) * (done + len(indices)) > seconds):
            break
        text = texts[_key(unit, indices)] = text_of(indices)
        rates.append((_clock() - begun) / len(indices))
        if text == RANDOM or (done >= 4 and text.startswith(UNREAD)):
            break
        done += len(indices)
    return texts


def _clock() -> float:
    """A clock in seconds that stands while this thread is ready and other threads have the processors. (proc(5),
    schedstat: the second number; where there is none, the clock never stands.)"""
    try:
        with open("/proc/thread-self/schedstat") as file:
            ready = int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        ready = 0.0
    return time.perf_counter() - ready


def _key(unit: str, indices: Indices) -> str:
    if len(indices) == 1:
        return f"{unit[:-1]} {indices[0]}"
    more = f", … ({len(indices)} of them)" if len(indices) > 8 else ""
    return f"{unit} {', '.join(map(str, indices[:8].tolist()))}{more}"


def _samples(dataset: Dataset, seed: int, indices: Indices) -> str:
    """The description of one sample, or the CRC-32 of several."""

    def read() -> str:
        if len(indices) == 1:
            named = zip(("inputs", "targets"), read_samples(dataset, indices, seed, 0), strict=True)
            return ", ".join(f"{name} {_described(structure)}" for name, structure in named)
        crc = 0
        for chunk in _slices(dataset, indices) if is_stacked(dataset) else indices[:, None]:
            crc = _crc(read_samples(dataset, chunk, seed, 0), crc)
        return f"{crc:08x}"

    try:
        with restoring_globals():
            text = read()
            if isinstance(dataset, Stream):
                dataset.forget()
            return text if read() == text else RANDOM
    except DataError as error:
        return f"{UNREAD}: {error}"


def _slices(dataset: Any, indices: Indices) -> Iterator[Indices]:
    """Splits the indices into slices of about `_TAKE_BYTES`, estimated by the size of the first sample."""
    inputs, targets = read_samples(dataset, indices[:1], 0, 0)
    size = max(1, sum(np.asarray(leaf).nbytes for leaf in leaves((inputs, targets))))
    step = max(1, _TAKE_BYTES // size)
    for start in range(0, len(indices), step):
        yield indices[start : start + step]


def _folder(file_of: Callable[[int], str | None], groups: Iterable[Indices]) -> str:
    """The one folder, the data set's, in which the files of the first groups lie, as "name/"; "" for several."""
    with suppress(Exception):  # `_files` gives the reason
        first = [index for _, indices in zip(range(4), groups, strict=False) for index in indices.tolist()]
        folders = {PurePath(path).parent for index in first if (path := file_of(index)) is not None}
        return f"{folders.pop().name}/" if len(folders) == 1 else ""
    return ""


def _files(file_of: Callable[[int], str | None], indices: Indices, root: str) -> str:
    """The CRC-32 of the files' sizes and names, each with one folder but for `root`, so a copy gives the same."""
    try:
        paths = [path for index in indices.tolist() if (path := file_of(index)) is not None]
        lines = [f"{'/'.join(PurePath(p).parts[-2:]).removeprefix(root)} {os.path.getsize(p)}" for p in paths]
    except Exception as error:  # noqa: BLE001 - name_of may return no file's path
        return f"{UNREAD}: {error}"
    return f"{zlib.crc32(chr(10).join(lines).encode(errors='surrogateescape')):08x}"


def _described(data: Any) -> str:
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key}: {_described(value)}" for key, value in data.items()) + "}"
    if isinstance(data, (tuple, list)):
        return "(" + ", ".join(map(_described, data)) + ")"
    array = np.ascontiguousarray(data)
    return f"{describe(array)} {zlib.crc32(_bytes(array)):08x}"


def _crc(data: Any, crc: int) -> int:
    """Continues `crc` over a part of samples, nested or not. Stacked and single samples give different sums, but a data
    set is always read in the same way.
    """
    if isinstance(data, Mapping):
        for key, value in data.items():
            crc = _crc(value, zlib.crc32(str(key).encode(), crc))
        return crc
    if isinstance(data, (tuple, list)):
        for value in data:
            crc = _crc(value, crc)
        return crc
    array = np.ascontiguousarray(data)
    return zlib.crc32(_bytes(array), zlib.crc32(describe(array).encode(), crc))


def _bytes(array: np.ndarray[Any, Any]) -> Any:
    """The array's memory; only types foreign to NumPy, such as bfloat16, are copied."""
    return array.reshape(-1).view(np.uint8) if array.size and array.dtype.kind != "V" else array.tobytes()


def _read_in_fork(dataset: Dataset, seed: int, timeout: float, seconds: float) -> dict[str, str]:
    def serve(commands: BinaryIO, reply: Answer, progress: Progress) -> None:
        try:
            reply({"texts": _read(dataset, seed, seconds, True)})
        except UsageError as error:
            reply({"wrong": str(error)})

    worker = Worker(serve)
    try:
        answer = worker.receive(timeout)
        if "wrong" in answer:
            raise UsageError(answer["wrong"])
        texts: dict[str, str] = answer["texts"]
        return texts
    except WorkerHungError:
        return {"samples": f"{UNREAD}: the first ones took more than {timeout:g} s"}
    except WorkerEndedError as error:
        return {"samples": f"{UNREAD}: the process that read them {error}"}
    finally:
        worker.end()
