"""Converts Paddle tensors to a checkpoint's shards, in memory that successive snapshots reuse, and loads them back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paddle_dp.checkpoint.shards import DTYPES, Box, Dims, TensorShard
from paddle_dp.errors import CheckpointError
from paddle_dp.tensors import bytes_of, dtype_of, narrowed, nbytes, widened

if TYPE_CHECKING:
    import paddle

_ALIGNED = 64  # bytes, of the arrays in a snapshot's memory
FLOATS = {"float64", "float32", "float16", "bfloat16"}


class HostMemory:
    """The memory of one snapshot. A second one, copied into the same HostMemory, overwrites the first.

    The kernel provides new memory page by page, at the first write: copying 500 MB into 123 new arrays took 0.5 s on a
    busy machine, and 0.06 s into memory that had been written before.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, np.ndarray] = {}

    def room(self, name: str, size: int, tensors: int) -> Room:
        """Room for `tensors` tensors of `size` bytes in total. The caller's `name` identifies the reused block."""
        required = size + tensors * _ALIGNED
        block = self._blocks.get(name)
        if block is None or block.size < required:
            # One large block, for which NumPy asks for huge pages.
            self._blocks[name] = block = np.empty(required, np.uint8)
        return Room(block)


class Room:
    """A block of host memory, allocated piece by piece."""

    def __init__(self, block: np.ndarray):
        self._block, self._offset = block, 0

    def take(self, size: int) -> np.ndarray:
        """The next `size` bytes, uint8 [size]. Raises ValueError if fewer are left."""
        start = -(-self._offset // _ALIGNED) * _ALIGNED
        if start + size > self._block.size:
            raise ValueError(f"{size} bytes, where {max(self._block.size - start, 0)} are left")
        self._offset = start + size
        return self._block[start : self._offset]


class WeightSource(Protocol):
    """Tensors by name. `folder`: their path, for messages."""

    folder: Path

    @property
    def names(self) -> tuple[str, ...]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def read(self, name: str, offset: Dims = None, shape: Dims = None) -> np.ndarray:
        """Reads the box of this shape at `offset` (default: the whole tensor) as a new array; bfloat16 as uint16."""
        ...


def box_at(source: WeightSource, name: str, offset: Dims, shape: Dims) -> Box:
    """The box of this shape at `offset` of the tensor `name`: by default from its first to its last element. Raises
    CheckpointError if there is no such box."""
    full = source.shape(name)
    start = (0,) * len(full) if offset is None else tuple(offset)
    size = tuple(n - o for n, o in zip(full, start, strict=False)) if shape is None else tuple(shape)
    legal = len(start) == len(size) == len(full) and min((*start, *size), default=0) >= 0
    if not legal or any(o + n > length for o, n, length in zip(start, size, full, strict=True)):
        raise CheckpointError(f"{name} is {full} in {source.folder}: it has no part at {start} of {size}.")
    return Box(start, size)


def tensor_shard(
    name: str, tensor: paddle.Tensor, global_shape: Dims = None, offset: Dims = None, room: Room | None = None
) -> TensorShard:
    """Copies a tensor to the host as the box at `offset` of a tensor of `global_shape` (default: the whole tensor).

    If `room` is given, a contiguous CPU tensor is copied into it.
    """
    array = _host_copy(tensor.detach(), room)
    return TensorShard(
        name,
        tuple(array.shape if global_shape is None else global_shape),
        tuple(offset or (0,) * array.ndim),
        array,
        dtype_of(tensor),
    )


def _host_copy(tensor: paddle.Tensor, room: Room | None) -> np.ndarray:
    """Copies the tensor's numbers into memory that training does not change."""
    size, address = nbytes(tensor), tensor.data_ptr()
    if size and address and tensor.place.is_cpu_place() and tensor.is_contiguous():
        copy = np.empty(size, np.uint8) if room is None else room.take(size)
        np.copyto(copy, bytes_of(tensor))  # Tensor.numpy() takes several times as long (3.3.1)
        return copy.view(DTYPES[dtype_of(tensor)][1]).reshape(tensor.shape)
    array = tensor.numpy()
    return array.copy() if array.ctypes.data == address else array


def fill(
    tensor: paddle.Tensor, checkpoint: WeightSource, name: str, global_shape: Dims = None, offset: Dims = None
) -> None:
    """Loads `name` of the checkpoint into a tensor, in place; with `global_shape`, loads its box at `offset`.

    Floats load into floats of any width: 16-bit ones, which O2 keeps on an accelerator, exactly into float32; wider
    ones rounded to nearest even. Raises CheckpointError for another shape or any other dtype, and for a finite number
    that float16 does not hold.
    """
    check_shape(checkpoint, name, tuple(tensor.shape if global_shape is None else global_shape))
    saved, expected = checkpoint.dtype(name), dtype_of(tensor)
    array = checkpoint.read(name, offset, tensor.shape)
    if saved != expected:
        if not {saved, expected} <= FLOATS:
            raise CheckpointError(f"{name} is {saved} in {checkpoint.folder} and {expected} in this model.")
        array, clipped = converted(array, saved, expected)
        if clipped:
            raise CheckpointError(f"{name} is too large in {checkpoint.folder} for {expected}.")
    put(tensor, array, name)


def converted(array: np.ndarray, dtype: str, target: str) -> tuple[np.ndarray, bool]:
    """Returns floats of one dtype in another, rounded to nearest even, and whether one is too large for it."""
    numbers, clipped = narrowed(widened(array, dtype).reshape(-1), target)
    return numbers.view(DTYPES[target][1]).reshape(array.shape), clipped


def check_shape(checkpoint: WeightSource, name: str, shape: tuple[int, ...]) -> None:
    """Raises CheckpointError unless `name` of the checkpoint has this shape."""
    if checkpoint.shape(name) != shape:
        raise CheckpointError(
            f"{name} is {list(checkpoint.shape(name))} in {checkpoint.folder} and {list(shape)} in this model: "
            f"the checkpoint is of another model, or of other settings of it."
        )


def put(tensor: paddle.Tensor, array: np.ndarray, name: str) -> None:
    """Copies an array (bfloat16 as uint16) into a tensor of the same shape and dtype, on any device. Raises
    CheckpointError if they differ."""
    here = np.dtype(DTYPES[dtype_of(tensor)][1])
    if (array.shape, array.dtype) != (tuple(tensor.shape), here):
        raise CheckpointError(
            f"{name} is {array.dtype} {list(array.shape)} in the checkpoint and {here} {list(tensor.shape)} here."
        )
    tensor.set_value(array)
