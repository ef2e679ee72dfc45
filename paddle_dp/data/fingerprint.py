"""What a data set holds, in few words: to see whether two processes, or a run and its checkpoint, read the same data.

Reading everything would cost what an epoch of reading costs, so samples are read for a fraction of a second only, in an
order that spreads any number of them evenly over the data set: small data sets whole, of others as many as there is
time for. Of data sets of files, names and sizes are looked at in the same order: that is cheaper than decoding them.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, BinaryIO

import numpy as np

from paddle_dp.data.randomness import globals_kept
from paddle_dp.data.sample import Dataset, describe, file_names, is_stacked, read_samples
from paddle_dp.data.worker import Answer, Progress, Worker, WorkerEndedError, WorkerHungError
from paddle_dp.errors import DataError

UNREAD = "cannot be read"
RANDOM = "is another one each time it is read"
SECONDS = 0.2  # of reading samples; a quarter of it more for names and sizes of files
_AT_ONCE = 2**22  # bytes that `take` is asked for in one call

Indices = np.ndarray[Any, np.dtype[np.int64]]


def fingerprint(
    dataset: Dataset, seed: int, apart: bool = False, timeout: float = 120.0, seconds: float = SECONDS
) -> dict[str, str]:
    """{"sample 0": "inputs float32[1, 64] 1f0c2a77, targets int64[1] 7b21e4d0", …, "samples 12, 9, 6, 3": "0e11c5aa"}:
    what is read in epoch 0, of four samples with type, shape and CRC-32, then of groups of samples, each half as large
    as all before it together, until all are read or `seconds` are over; of files, "files 0, 8, 4, …", too.

    The same data give the same text under each key that two fingerprints have in common; a slower process has fewer
    keys. Where a sample cannot be read, its text says why. Samples are read twice (those of `take`, which knows no
    randomness, once), and a group that is random in a way that nobody seeds is told to be so and is the last.
    `apart` reads in a process of its own, for data sets that workers will read: a file that is opened at the first
    sample must not be inherited by them.
    """
    return _apart(dataset, seed, timeout, seconds) if apart else _read(dataset, seed, seconds)


def common(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The keys that can be compared: those of both, but for samples that one of them cannot read or that are random."""
    untold = (UNREAD, RANDOM)
    return [
        key
        for key in one
        if key in other and not one[key].startswith(untold) and not other[key].startswith(untold)
    ]


def order(samples: int) -> Iterator[Indices]:
    """Groups of indices that hold every sample in the end: four single ones, the first and the last among them, then
    four or more at a time, each group spread over all by steps of the golden section (Weyl's sequence).
    """
    for index in sorted({0, samples // 3, 2 * samples // 3, samples - 1}) if samples else []:
        yield np.array([index])
    stride = next(
        n for n in range(max(1, round(samples * 0.618034)), 2 * samples + 2) if math.gcd(n, samples) == 1
    )
    done = 0
    while done < samples:
        more = min(max(4, done // 2), samples - done)
        # In Python's integers, which do not overflow, for the first; the group's own steps fit into 64 bits.
        start, steps = done * stride % samples, np.arange(1, more + 1, dtype=np.int64)
        yield (start + steps * (stride % samples) % samples) % samples
        done += more


def _read(dataset: Dataset, seed: int, seconds: float) -> dict[str, str]:
    def sample(indices: Indices) -> str:
        return _samples(dataset, seed, indices)

    found = _walk(len(dataset), "samples", sample, seconds)
    name_of = file_names(dataset)
    if name_of is not None:
        found |= _walk(len(dataset), "files", lambda indices: _files(name_of, indices), seconds / 4)
    return found


def _walk(samples: int, what: str, describe: Callable[[Indices], str], seconds: float) -> dict[str, str]:
    """`describe` of one group after another, while it is likely that the next is done in time."""
    found: dict[str, str] = {}
    began, done = time.perf_counter(), 0
    for indices in order(samples):
        spent = time.perf_counter() - began
        if done >= 4 and spent / done * (done + len(indices)) > seconds:
            break
        text = found[_key(what, indices)] = describe(indices)
        if text == RANDOM or (done >= 4 and text.startswith(UNREAD)):
            break
        done += len(indices)
    return found


def _key(what: str, indices: Indices) -> str:
    if len(indices) == 1:
        return f"{what[:-1]} {indices[0]}"
    more = f", … ({len(indices)} of them)" if len(indices) > 8 else ""
    return f"{what} {', '.join(map(str, indices[:8].tolist()))}{more}"


def _samples(dataset: Dataset, seed: int, indices: Indices) -> str:
    """One sample in words, or the CRC-32 of several."""
    is_fixed = is_stacked(dataset)  # the same each time, by its contract

    def told() -> str:
        if len(indices) == 1:
            parts = zip(("inputs", "targets"), read_samples(dataset, indices, seed, 0), strict=True)
            return ", ".join(f"{word} {_described(part)}" for word, part in parts)
        crc = 0
        for some in _slices(dataset, indices) if is_fixed else indices[:, None]:
            crc = _crc(read_samples(dataset, some, seed, 0), crc)
        return f"{crc:08x}"

    try:
        with globals_kept():
            found = told()
            return found if is_fixed or told() == found else RANDOM
    except DataError as error:
        return f"{UNREAD}: {error}"


def _slices(dataset: Any, indices: Indices) -> Iterator[Indices]:
    """The indices in slices whose samples take some megabytes; the first sample says how many that are."""
    inputs, targets = read_samples(dataset, indices[:1], 0, 0)
    size = max(1, int(np.asarray(inputs).nbytes + np.asarray(targets).nbytes))
    step = max(1, _AT_ONCE // size)
    for start in range(0, len(indices), step):
        yield indices[start : start + step]


def _files(name_of: Callable[[int], str], indices: Indices) -> str:
    """The CRC-32 of names, with their folder's, and sizes: the same for a copy elsewhere."""
    try:
        paths = [name_of(index) for index in indices.tolist()]
        lines = [f"{'/'.join(PurePath(path).parts[-2:])} {os.path.getsize(path)}" for path in paths]
    except Exception as error:  # noqa: BLE001 - names are a courtesy of data sets, and need not be files'
        return f"{UNREAD}: {error}"
    return f"{zlib.crc32(chr(10).join(lines).encode(errors='surrogateescape')):08x}"


def _described(part: Any) -> str:
    if isinstance(part, Mapping):
        return "{" + ", ".join(f"{key}: {_described(value)}" for key, value in part.items()) + "}"
    if isinstance(part, (tuple, list)):
        return "(" + ", ".join(map(_described, part)) + ")"
    array = np.ascontiguousarray(part)
    return f"{describe(array)} {zlib.crc32(_bytes(array)):08x}"


def _crc(part: Any, crc: int) -> int:
    """`crc` with a part of samples behind it, however it is nested. A stack of samples and one after the other give
    different sums: a data set has `take`, or it has not.
    """
    if isinstance(part, Mapping):
        for key, value in part.items():
            crc = _crc(value, zlib.crc32(str(key).encode(), crc))
        return crc
    if isinstance(part, (tuple, list)):
        for value in part:
            crc = _crc(value, crc)
        return crc
    array = np.ascontiguousarray(part)
    return zlib.crc32(_bytes(array), zlib.crc32(describe(array).encode(), crc))


def _bytes(array: np.ndarray[Any, Any]) -> Any:
    """The array's memory; types that are none of NumPy's own, such as bfloat16, cannot be seen without a copy."""
    return array.reshape(-1).view(np.uint8) if array.size and array.dtype.kind != "V" else array.tobytes()


def _apart(dataset: Dataset, seed: int, timeout: float, seconds: float) -> dict[str, str]:
    def serve(commands: BinaryIO, tell: Answer, progress: Progress) -> None:
        tell(_read(dataset, seed, seconds))

    worker = Worker(serve)
    try:
        return worker.receive(timeout)
    except WorkerHungError:
        return {"samples": f"{UNREAD}: the first ones took more than {timeout:g} s"}
    except WorkerEndedError as error:
        return {"samples": f"{UNREAD}: the process that read them {error}"}
    finally:
        worker.end()
