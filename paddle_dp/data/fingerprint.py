"""What some samples of a data set are, in few words: to see whether two processes read the same data."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from paddle_dp.data.child import Child, ChildEndedError, ChildHungError, Progress, Tell
from paddle_dp.data.randomness import globals_kept
from paddle_dp.data.sample import Dataset, describe, read_samples
from paddle_dp.errors import DataError

UNREAD = "cannot be read"
RANDOM = "is another one each time it is read"


def fingerprint(dataset: Dataset, seed: int, apart: bool = False, timeout: float = 120.0) -> dict[str, str]:
    """{"sample 0": "inputs float32[1, 64] 1f0c2a77, targets int64[1] 7b21e4d0", …} of four samples, the first and
    the last among them, as they are read in epoch 0: type, shape and CRC-32.

    Where a sample cannot be read, its text says why; each is read twice, and one that is random in a way that nobody
    seeds is told to be so. `apart` reads in a process of its own, for data sets that workers
    will read: a file that is opened at the first sample must not be inherited by them.
    """
    return _apart(dataset, seed, timeout) if apart else _read(dataset, seed)


def _read(dataset: Dataset, seed: int) -> dict[str, str]:
    samples = len(dataset)
    chosen = sorted({0, samples // 3, 2 * samples // 3, samples - 1}) if samples else []
    return {f"sample {index}": _sample(dataset, seed, index) for index in chosen}


def _sample(dataset: Dataset, seed: int, index: int) -> str:
    def read() -> str:
        with globals_kept():
            parts = read_samples(dataset, np.array([index]), seed, 0)
        return ", ".join(
            f"{word} {_described(part)}" for word, part in zip(("inputs", "targets"), parts, strict=True)
        )

    try:
        found = read()
        return found if read() == found else RANDOM
    except DataError as error:
        return f"{UNREAD}: {error}"


def _described(part: Any) -> str:
    if isinstance(part, Mapping):
        return "{" + ", ".join(f"{key}: {_described(value)}" for key, value in part.items()) + "}"
    if isinstance(part, (tuple, list)):
        return "(" + ", ".join(map(_described, part)) + ")"
    array = np.ascontiguousarray(part)
    return f"{describe(array)} {zlib.crc32(array.tobytes()):08x}"


def _apart(dataset: Dataset, seed: int, timeout: float) -> dict[str, str]:
    def serve(commands: BinaryIO, tell: Tell, progress: Progress) -> None:
        tell(_read(dataset, seed))

    child = Child(serve)
    try:
        return child.receive(timeout)
    except ChildHungError:
        return {"samples": f"{UNREAD}: the first ones took more than {timeout:g} s"}
    except ChildEndedError as error:
        return {"samples": f"{UNREAD}: the process that read them {error}"}
    finally:
        child.end()
