"""Reads and writes tensors in the safetensors format, with a checksum and without mapping the file.

The safetensors package writes without errno, fsync and checksum. It maps the file when it reads, so a file overwritten
in place would change live weights, and it needs ml_dtypes for bfloat16 in NumPy. The format is eight bytes, a JSON
header and the raw numbers: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.disk import Digest, open_regular, write
from paddle_dp.checkpoint.shards import DTYPES, TensorShard

Forms = Mapping[str, tuple[str, tuple[int, ...]]]  # key → (dtype, shape)
_LABELS = {code: label for label, (code, _) in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file; `start` is its offset in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def numpy(self) -> np.dtype:
        return np.dtype(DTYPES[self.dtype][1])

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.numpy.itemsize


def write_tensors(
    path: Path, shards: Mapping[str, TensorShard], metadata: Mapping[str, str] | None = None
) -> Digest:
    """Writes the shards' arrays under the given keys and flushes the file to the disk."""
    forms = {key: (shard.dtype, tuple(shard.array.shape)) for key, shard in shards.items()}
    return stream_tensors(path, forms, lambda key: shards[key].array, metadata)


def stream_tensors(
    path: Path,
    forms: Forms,
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> Digest:
    """Writes tensors of the given dtypes and shapes and flushes the file to the disk. `read(key)` is called for one
    tensor at a time, so only one is in memory."""
    # Largest element sizes first, so that every tensor is aligned.
    keys = sorted(forms, key=lambda key: (-np.dtype(DTYPES[forms[key][0]][1]).itemsize, key))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for key in keys:
        info = TensorInfo(*forms[key], position)
        end = position + info.nbytes
        header[key] = {
            "dtype": DTYPES[info.dtype][0],
            "shape": list(info.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = [struct.pack("<Q", len(text)), text]
    return write(path, itertools.chain(head, (_raw(read(key), forms[key][0]) for key in keys)))


def _raw(array: np.ndarray, dtype: str) -> memoryview:
    array = np.ascontiguousarray(array, dtype=DTYPES[dtype][1])
    return array.reshape(-1).view(np.uint8).data


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a file by key. Raises ValueError if the header does not describe this file."""
    header, length, size = _header(path)
    header.pop("__metadata__", None)
    infos = {key: _info(key, json_codec.mapping(value, key), 8 + length) for key, value in header.items()}
    end = 8 + length
    # Overlapping tensors could take more memory than the file has bytes.
    for key, info in sorted(infos.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start < end or info.start + info.nbytes > size:
            raise ValueError(f"describes {key} wrongly")
        end = info.start + info.nbytes
    return infos


def read_metadata(path: Path) -> dict[str, Any]:
    """A file's metadata; `format` names the framework that it was written for."""
    header, _, _ = _header(path)
    return json_codec.mapping(header.get("__metadata__", {}), "__metadata__")


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, its length and the file's size, both in bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > min(size - 8, _LONGEST_HEADER):
            raise ValueError("is not a safetensors file")
        return json_codec.mapping(json_codec.decode(file.read(length)), "the header"), length, size


def _info(key: str, value: Any, base: int) -> TensorInfo:
    if not isinstance(value["dtype"], str) or value["dtype"] not in _LABELS:
        raise ValueError(f"holds {key} as {str(value['dtype'])[:30]}, which this version does not know")
    shape, offsets = (
        json_codec.naturals(value[field], f"{key}: {field}") for field in ("shape", "data_offsets")
    )
    if len(offsets) != 2:
        raise ValueError(f"describes {key} wrongly")
    info = TensorInfo(_LABELS[value["dtype"]], shape, base + offsets[0])
    if offsets[1] - offsets[0] != info.nbytes:
        raise ValueError(f"describes {key} wrongly")
    return info


def read_rows(path: Path, info: TensorInfo, rows: slice | None = None) -> np.ndarray:
    """Reads the tensor, or some rows of its first dim, as a new array. Raises OSError if the file is too short."""
    shape, start = info.shape, info.start
    if rows is not None and shape:
        start += rows.start * math.prod(shape[1:]) * info.numpy.itemsize
        shape = (rows.stop - rows.start, *shape[1:])
    count = math.prod(shape)
    array = np.fromfile(path, dtype=info.numpy, count=count, offset=start)
    if array.size != count:
        raise OSError(f"{path} ends too early")
    return array.reshape(shape)
