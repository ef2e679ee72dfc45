"""Batches, weights and gradients as NumPy arrays in files, and back: what one rank saw, for the run on one process."""

from __future__ import annotations

import gc
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle.base.framework import EagerParamBase

MOST = 8_000_000  # elements that are kept of all gradients of a rank together; beyond, every n-th is
LARGEST = 2 << 30  # bytes of batches that are kept of one step

# ["list", …], ["tuple", …], ["dict", {…}], ["tensor", number], ["array", number] or ["plain", value]
Structure = list[Any]


def flatten(data: Any) -> tuple[Structure, list[Any]]:
    """A batch as its structure, which is JSON, and its tensors and arrays in order."""
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
    """The batch again; its tensors are made where Paddle makes tensors now."""
    kind, value = structure
    if kind in ("list", "tuple"):
        each = [unflatten(part, leaves) for part in value]
        return tuple(each) if kind == "tuple" else each
    if kind == "dict":
        return {key: unflatten(part, leaves) for key, part in value.items()}
    if kind == "tensor":
        return paddle.to_tensor(leaves[value])
    return leaves[value] if kind == "array" else value


def numbers(tensor: paddle.Tensor, every: int = 1) -> np.ndarray:
    """A tensor's elements, or every n-th, as a flat array; low precision as float32, which holds it."""
    flat = tensor.detach()
    if flat.dtype in (paddle.bfloat16, paddle.float16):
        flat = flat.astype("float32")
    return flat.numpy().reshape(-1)[::every].copy()


def digest(tensor: paddle.Tensor) -> str:
    """A check sum of a tensor's bits."""
    return f"{zlib.crc32(np.ascontiguousarray(tensor.detach().numpy()).tobytes()):08x}"


def digests(parameters: Iterable[paddle.Tensor]) -> dict[str, str]:
    return {each.name: digest(each) for each in parameters if each._is_initialized()}


def stride(parameters: Iterable[paddle.Tensor]) -> int:
    """Every how many elements are kept, so that all together stay below MOST."""
    return -(-sum(int(np.prod(each.shape)) for each in parameters) // MOST) or 1


def live_parameters() -> dict[str, paddle.Tensor]:
    """Every parameter that exists in this process, trained or frozen, by name."""
    return {each.name: each for each in gc.get_objects() if isinstance(each, EagerParamBase)}


def write_batches(folder: Path, name: str, batches: list[Any]) -> bool:
    """Leaves batches in `folder` as `name`.npz and .json; False, and nothing, when they are too large."""
    flat = [flatten(batch) for batch in batches]
    arrays = {
        f"{number}.{place}": leaf.numpy() if isinstance(leaf, paddle.Tensor) else leaf
        for number, (_, leaves) in enumerate(flat)
        for place, leaf in enumerate(leaves)
    }
    if sum(array.nbytes for array in arrays.values()) > LARGEST:
        return False
    np.savez(folder / f"{name}.npz", **arrays)
    (folder / f"{name}.json").write_text(json.dumps([structure for structure, _ in flat]))
    return True


def read_batches(folder: Path, name: str) -> list[tuple[Structure, list[np.ndarray]]]:
    """What `write_batches` left."""
    with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
        structures = json.loads((folder / f"{name}.json").read_text())
        counts = [
            len([name for name in file.files if name.startswith(f"{n}.")]) for n in range(len(structures))
        ]
        return [
            (structure, [file[f"{n}.{place}"] for place in range(counts[n])])
            for n, structure in enumerate(structures)
        ]
