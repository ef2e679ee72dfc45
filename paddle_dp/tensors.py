"""Sizes, dtypes and bytes of tensors, as NumPy views without a copy; 16-bit numbers for arithmetic."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import paddle

Array = np.ndarray[Any, Any]
LARGEST_HALF = 65504.0  # float16's largest number


def nbytes(tensor: paddle.Tensor) -> int:
    """The size of a tensor in bytes, also while its memory is freed. (`tensor.size` takes 4 µs.)"""
    return math.prod(tensor.shape) * int(tensor.element_size())


def bytes_of(tensor: paddle.Tensor) -> Array:
    """A writable uint8 view [bytes] of a contiguous CPU tensor. It keeps the tensor alive; the tensor must keep its
    memory. (`Tensor.numpy()` copies.)"""
    if not (size := nbytes(tensor)):
        return np.empty(0, np.uint8)
    memory = (ctypes.c_char * size).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return np.frombuffer(memoryview(memory), np.uint8)


def on_host(array: Array) -> paddle.Tensor:
    """Copies `array` to a tensor in host memory, independent of Paddle's device.

    `paddle.to_tensor` does the same after checking its argument's type, which takes as long as the copy of a small
    array.
    """
    import paddle

    make = paddle.Tensor if type(array) is np.ndarray else paddle.to_tensor
    return make(array, place=paddle.CPUPlace())


def holds_nan(numbers: paddle.Tensor) -> bool:
    """True if a CPU tensor of floats holds a NaN; False on accelerators, which it would wait for. It takes 4 µs."""
    if not numbers.place.is_cpu_place():
        return False
    numbers = numbers.detach()
    return not math.isfinite(numbers.sum().item()) and bool(numbers.isnan().any().item())


def has_counted_nan(scores: paddle.Tensor, numbers: paddle.Tensor, ignored: int) -> bool:
    """True if scores [..., classes] hold a NaN for a class number [...] that is not `ignored`."""
    return bool(scores.detach().isnan().any(-1).logical_and(numbers != ignored).any().item())


def moved_gradient(parameter: paddle.Tensor) -> paddle.Tensor:
    """Takes the gradient, contiguous, from a parameter that has one. Copies only tensors that are not contiguous."""
    import paddle

    gradient = parameter.grad
    assert gradient is not None
    # A transposed parameter's gradient is not contiguous. Paddle works in place: clearing would free it (3.3.1).
    gradient = gradient.contiguous()
    moved = paddle.empty(gradient.shape, gradient.dtype)
    gradient._share_buffer_to(moved)
    parameter.clear_gradient(False)
    return moved


def numbers_of(data: Any, dtype: str) -> Array:
    """Bytes as numbers for arithmetic: 16-bit numbers as a float32 copy, others as a view. `dtype`: "bfloat16", …"""
    return widened(np.frombuffer(data, np.uint16 if dtype == "bfloat16" else dtype), dtype)


def bytes_from(numbers: Array, dtype: str) -> Array:
    """The inverse: contiguous numbers as bytes, rounded to nearest even; 32 and 64 bits without a copy."""
    if dtype == "bfloat16":
        bits = numbers.astype(np.float32, copy=False).view("<u4")
        rounded = bits >> 16  # in place from here on: writing new memory takes several times as long
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        if np.isnan(numbers.sum()):  # or of infinities of both signs
            rounded[np.isnan(numbers)] = 0x7FC0 << 16
        return np.ascontiguousarray(rounded.view("<u2")[1::2]).view(np.uint8)
    return numbers.astype(dtype, copy=False).view(np.uint8)


def widened(array: Array, dtype: str) -> Array:
    """16-bit floats in float32, others as they are. NumPy has no bfloat16: its bits are uint16."""
    if dtype == "bfloat16":  # the upper half of a float32
        bits = np.zeros(array.size, "<u4")
        bits.view("<u2")[1::2] = array.reshape(-1)
        return bits.view(np.float32).reshape(array.shape)
    return array.astype(np.float32) if dtype == "float16" else array


def narrowed(numbers: Array, dtype: str) -> tuple[Array, bool]:
    """`bytes_from` for sums with residuals: clips finite numbers to float16's largest. Also returns whether any was
    clipped. NaN and infinities stay."""
    clipped = False
    if dtype == "float16" and (np.abs(numbers) >= LARGEST_HALF).any():
        clipped_numbers = np.where(np.isfinite(numbers), numbers.clip(-LARGEST_HALF, LARGEST_HALF), numbers)
        clipped, numbers = bool((clipped_numbers != numbers)[np.isfinite(numbers)].any()), clipped_numbers
    return bytes_from(numbers, dtype), clipped


def dtype_of(tensor: paddle.Tensor) -> str:
    """A dtype's name: "float32", "bfloat16", …"""
    return str(tensor.dtype).rpartition(".")[2]


def wide(parameter: paddle.Tensor) -> str:
    """The dtype in which a parameter's gradients are summed and residuals kept: float32, or float64 for float64."""
    return "float64" if dtype_of(parameter) == "float64" else "float32"


def as_dtype(tensor: paddle.Tensor, dtype: str) -> paddle.Tensor:
    """The tensor in this dtype; itself if it has it already."""
    return tensor if dtype_of(tensor) == dtype else tensor.astype(dtype)
