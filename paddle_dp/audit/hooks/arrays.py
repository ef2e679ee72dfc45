"""Writes a rank's batches, weights and gradients to files, and reads them back for the run on one process."""

from __future__ import annotations

import gc
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase

MAX_ELEMENTS = 8_000_000  # recorded of all gradients of a rank together; of more, every n-th
MAX_BATCH_BYTES = 2 << 30  # of the batches of one step; larger ones are not recorded

# ["list", …], ["tuple", …], ["dict", {…}], ["tensor", number], ["array", number] or ["plain", value]
Structure = list[Any]


def flatten(data: Any) -> tuple[Structure, list[Any]]:
    """A batch as its structure (JSON) and the list of its tensors and arrays."""
    leaves: list[Any] = []
    return _flatten(data, leaves), leaves


def _flatten(data: Any, leaves: list[Any]) -> Structure:
    if isinstance(data, list | tuple):
        return ["tuple" if isinstance(data, tuple) else "list", [_flatten(each, leaves) for each in data]]
    if isinstance(data, Mapping):
        return ["dict", {str(key): _flatten(each, leaves) for key, each in data.items()}]
    if isinstance(data, paddle.Tensor | np.ndarray):
        leaves.append(data)
        return ["tensor" if isinstance(data, paddle.Tensor) else "array", len(leaves) - 1]
    return ["plain", data if isinstance(data, str | int | float | bool | None) else repr(data)]


def unflatten(structure: Structure, leaves: list[np.ndarray]) -> Any:
    """The inverse of `flatten`; tensors are made on the current device."""
    kind, value = structure
    if kind in ("list", "tuple"):
        each = [unflatten(element, leaves) for element in value]
        return tuple(each) if kind == "tuple" else each
    if kind == "dict":
        return {key: unflatten(element, leaves) for key, element in value.items()}
    if kind == "tensor":
        return paddle.to_tensor(leaves[value])
    return leaves[value] if kind == "array" else value


def numbers(tensor: paddle.Tensor, every: int = 1) -> np.ndarray:
    """A tensor's elements, or every n-th, as a flat array; bfloat16 and float16 as float32."""
    flat = tensor.detach()
    if flat.dtype in (paddle.bfloat16, paddle.float16):
        flat = flat.astype("float32")
    return flat.numpy().reshape(-1)[::every].copy()


def crc(content: bytes) -> str:
    """The CRC-32, in 8 hexadecimal digits."""
    return f"{zlib.crc32(content):08x}"


def digests(parameters: Iterable[paddle.Tensor]) -> dict[str, str]:
    """The CRC-32 of each parameter's bytes, by name."""
    return {p.name: crc(p.detach().numpy().tobytes()) for p in parameters if p._is_initialized()}


def stride(parameters: Iterable[paddle.Tensor]) -> int:
    """The n of "every n-th element" that leaves MAX_ELEMENTS at most."""
    return -(-sum(int(np.prod(each.shape)) for each in parameters) // MAX_ELEMENTS) or 1


def live_parameters() -> dict[str, paddle.Tensor]:
    """Every parameter that exists in this process, trained or frozen, by name."""
    return {each.name: each for each in gc.get_objects() if isinstance(each, EagerParamBase)}


def write_batches(folder: Path, name: str, batches: list[Any]) -> None:
    """Writes batches to `name`.npz and `name`.json in `folder`, or nothing if they are too large."""
    flat = [flatten(batch) for batch in batches]
    arrays = {
        f"{number}.{index}": leaf.numpy() if isinstance(leaf, paddle.Tensor) else leaf
        for number, (_, leaves) in enumerate(flat)
        for index, leaf in enumerate(leaves)
    }
    if sum(array.nbytes for array in arrays.values()) > MAX_BATCH_BYTES:
        return
    np.savez(folder / f"{name}.npz", **arrays)
    (folder / f"{name}.json").write_text(json.dumps([structure for structure, _ in flat]))


def read_batches(folder: Path, name: str) -> list[tuple[Structure, list[np.ndarray]]]:
    """The batches that `write_batches` wrote: structure and arrays of each."""
    with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
        structures = json.loads((folder / f"{name}.json").read_text())
        counts = Counter(int(key.partition(".")[0]) for key in file.files)
        return [
            (structure, [file[f"{n}.{index}"] for index in range(counts[n])])
            for n, structure in enumerate(structures)
        ]
