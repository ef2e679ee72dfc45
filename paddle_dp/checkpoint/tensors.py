"""Between Paddle's tensors and a checkpoint's shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from paddle_dp.checkpoint.shards import DTYPES, TensorShard
from paddle_dp.errors import CheckpointError

if TYPE_CHECKING:
    import paddle

    from paddle_dp.checkpoint.loading import Checkpoint


def dtype_of(tensor: paddle.Tensor) -> str:
    """Paddle's word for a tensor's dtype, as a shard carries it: "float32", "bfloat16"."""
    return str(tensor.dtype).rpartition(".")[2]


def tensor_shard(
    name: str,
    tensor: paddle.Tensor,
    global_shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> TensorShard:
    """A host copy of a tensor: the box at `offset` of one of `global_shape` (default: it is the whole tensor)."""
    array = tensor.detach().numpy()
    if array.ctypes.data == tensor.data_ptr():
        # Paddle's numpy() may share memory with the live tensor on a CPU; training goes on while a shard is kept.
        array = array.copy()
    return TensorShard(
        name,
        tuple(array.shape if global_shape is None else global_shape),
        tuple(offset or (0,) * array.ndim),
        array,
        dtype_of(tensor),
    )


def fill(
    tensor: paddle.Tensor,
    checkpoint: Checkpoint,
    name: str,
    global_shape: Sequence[int] | None = None,
    offset: Sequence[int] | None = None,
) -> None:
    """Gives a tensor the values of `name`, in place: all of it, or, where the tensor is the box at `offset` of one of
    `global_shape`, those.

    A float32 tensor takes 16-bit floats, too, whose every value it holds: what precision level O2 kept on a GPU. It
    takes float64 rounded, and a float64 tensor takes float32: a run whose precision was changed between the two.
    Raises CheckpointError when the checkpoint's tensor is of another shape or of any other dtype.
    """
    whole = tuple(tensor.shape if global_shape is None else global_shape)
    if checkpoint.shape(name) != whole:
        raise CheckpointError(
            f"{name} is {list(checkpoint.shape(name))} in {checkpoint.folder} and {list(whole)} in this model: "
            f"the checkpoint is of another model, or of other settings of it."
        )
    saved, wanted = checkpoint.dtype(name), dtype_of(tensor)
    array = checkpoint.read(name, offset, tensor.shape)
    if wanted == "float32" and saved in ("bfloat16", "float16"):
        put(tensor, _widened(array, saved), name)
        return
    if {saved, wanted} == {"float32", "float64"}:
        put(tensor, array.astype(wanted), name)
        return
    if saved != wanted:
        raise CheckpointError(f"{name} is {saved} in {checkpoint.folder} and {wanted} in this model.")
    put(tensor, array, name)


def _widened(array: np.ndarray, dtype: str) -> np.ndarray:
    """The same numbers in float32; bfloat16, which comes as its bits, is float32's first half."""
    if dtype == "bfloat16":
        return np.asarray(array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def put(tensor: paddle.Tensor, array: np.ndarray, name: str) -> None:
    """Copies an array (bfloat16 as uint16) into a tensor of the same shape and dtype, wherever it lives."""
    here = np.dtype(DTYPES[dtype_of(tensor)][1])
    if (array.shape, array.dtype) != (tuple(tensor.shape), here):
        raise CheckpointError(
            f"{name} is {array.dtype} {list(array.shape)} in the checkpoint and {here} {list(tensor.shape)} here."
        )
    tensor.set_value(array)
