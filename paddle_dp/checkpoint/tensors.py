"""Between Paddle's tensors and a checkpoint's pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paddle_dp.checkpoint.pieces import DTYPES, Piece
from paddle_dp.errors import CheckpointError

if TYPE_CHECKING:
    import paddle

    from paddle_dp.checkpoint.opened import Checkpoint


def dtype_of(tensor: paddle.Tensor) -> str:
    """Paddle's word for a tensor's dtype, as a piece carries it: "float32", "bfloat16"."""
    return str(tensor.dtype).rpartition(".")[2]


def piece(
    name: str, tensor: paddle.Tensor, shape: Sequence[int] | None = None, offset: Sequence[int] | None = None
) -> Piece:
    """A host copy of a tensor, as the box at `offset` of a tensor of `shape` (default: it is the whole tensor)."""
    # Paddle's numpy() may share memory with the live tensor on a CPU; training goes on while a piece is kept.
    array = np.array(tensor.detach().numpy(), copy=True)
    return Piece(
        name,
        tuple(array.shape if shape is None else shape),
        tuple(offset or (0,) * array.ndim),
        array,
        dtype_of(tensor),
    )


def fill(
    tensor: paddle.Tensor, checkpoint: Checkpoint, name: str, offset: Sequence[int] | None = None
) -> None:
    """Gives a tensor the values of `name`, in place: all of it, or the box at `offset` of the tensor's shape.

    Raises CheckpointError when the checkpoint's tensor is of another shape or dtype.
    """
    shape = tuple(tensor.shape)
    if offset is None and checkpoint.shape(name) != shape:
        raise CheckpointError(
            f"{name} is {list(checkpoint.shape(name))} in {checkpoint.folder} and {list(shape)} in this model: "
            f"the checkpoint is of another model, or of other settings of it."
        )
    saved = checkpoint.dtype(name)
    if saved != dtype_of(tensor):
        raise CheckpointError(
            f"{name} is {saved} in {checkpoint.folder} and {dtype_of(tensor)} in this model."
        )
    put(tensor, checkpoint.read(name, offset, shape), name)


def put(tensor: paddle.Tensor, array: np.ndarray, name: str) -> None:
    """Copies an array (bfloat16 as uint16) into a tensor of the same shape and dtype, wherever it lives."""
    here = np.dtype(DTYPES[dtype_of(tensor)][1])
    if (array.shape, array.dtype) != (tuple(tensor.shape), here):
        raise CheckpointError(
            f"{name} is {array.dtype} {list(array.shape)} in the checkpoint and {here} {list(tensor.shape)} here."
        )
    tensor.set_value(array)
