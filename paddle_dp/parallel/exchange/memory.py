"""A host tensor's memory as an array, without a copy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import paddle


def bytes_of(tensor: paddle.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a contiguous tensor on the CPU, [size × bytes an element], where they lie: what is written there is
    the tensor's. Valid as long as the tensor keeps its memory. (`Tensor.numpy()` copies.)"""
    size = int(tensor.size) * int(tensor.element_size())
    if not size:
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())), np.uint8)


def numbers_of(data: Any, dtype: str) -> np.ndarray[Any, Any]:
    """Bytes as numbers to calculate with: those of 16 bits as float32, others where they lie. `dtype`: "bfloat16", …"""
    if dtype == "bfloat16":  # unknown to NumPy: the upper half of a float32
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    values = np.frombuffer(data, dtype)
    return values.astype(np.float32) if dtype == "float16" else values


def dtype_of(tensor: paddle.Tensor) -> str:
    """«float32», «bfloat16», …"""
    return str(tensor.dtype).rpartition(".")[2]
