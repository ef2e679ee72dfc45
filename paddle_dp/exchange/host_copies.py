"""Batched copies between an accelerator's tensors and host memory: one flat copy per dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from paddle_dp.mesh.copies import Arriving, ToHost, to_device
from paddle_dp.tensors import Array, bytes_of, dtype_of


class FlatCopy:
    """A copy of concatenated tensors of one dtype to the host."""

    def __init__(self, tensors: Mapping[int, paddle.Tensor], to_host: ToHost):
        self._sizes = {number: int(tensor.size) for number, tensor in tensors.items()}
        flat = paddle.concat([tensor.reshape([-1]) for tensor in tensors.values()])
        self._width = int(flat.element_size())
        self._arriving: Arriving = to_host.begin(flat)

    @property
    def is_there(self) -> bool:
        return self._arriving.is_there

    def take(self) -> dict[int, Array]:
        """Waits for the copy; returns the bytes of each tensor by its number. Call it once."""
        data, start, data_of = bytes_of(self._arriving.take()), 0, {}
        for number, size in self._sizes.items():
            stop = start + size * self._width
            data_of[number], start = data[start:stop], stop
        return data_of


def bytes_on_host(tensors: Mapping[int, paddle.Tensor], to_host: ToHost) -> dict[int, Array]:
    """Copies device tensors to the host; returns their bytes by number."""
    tensors_of_dtype: defaultdict[Any, dict[int, paddle.Tensor]] = defaultdict(dict)
    for number, tensor in tensors.items():
        tensors_of_dtype[tensor.dtype][number] = tensor
    copies = [FlatCopy(group, to_host) for group in tensors_of_dtype.values()]
    data_of: dict[int, Array] = {}
    for copy in copies:
        data_of |= copy.take()
    return data_of


@paddle.no_grad()
def to_tensors(data: Sequence[Any], tensors: Sequence[paddle.Tensor]) -> None:
    """Writes bytes into device tensors of the same shapes and dtypes. The bytes may be changed afterwards."""
    numbers_of_dtype: defaultdict[str, list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        numbers_of_dtype[dtype_of(tensor)].append(number)
    for dtype, numbers in numbers_of_dtype.items():
        array = np.concatenate([np.frombuffer(data[number], np.uint8) for number in numbers])
        narrow = dtype == "bfloat16"  # unknown to NumPy
        flat = to_device(array.view("int16" if narrow else dtype), tensors[numbers[0]].place)
        flat = flat.view(dtype) if narrow else flat
        sizes = [int(tensors[number].size) for number in numbers]
        for number, chunk in zip(
            numbers, paddle.split(flat, sizes) if len(sizes) > 1 else [flat], strict=True
        ):
            tensors[number].copy_(chunk.reshape(tensors[number].shape), False)
