"""Copies to the device, where there is none, or none with streams: `tests/sim/test_copies.py` has one."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.mesh.copies import has_streams, is_cpu, prefetch, to_device
from paddle_dp.tensors import on_host


def test_on_a_cpu_nothing_is_taken_ahead() -> None:
    items = iter(range(3))
    assert prefetch(items, paddle.CPUPlace()) is items
    assert is_cpu(paddle.CPUPlace()) and is_cpu(paddle.ones([1]).place)


def test_on_a_cpu_the_array_may_be_changed_afterwards() -> None:
    array = np.ones(3, np.float32)
    tensor = to_device(array, paddle.CPUPlace())
    array[:] = 7
    assert tensor.tolist() == [1, 1, 1]


COLUMNS = np.arange(6).reshape(2, 3).T
TYPES = ("bool", "uint8", "int32", "int64", "float16", "float64")


@pytest.mark.parametrize(
    "array",
    [COLUMNS.astype(dtype) for dtype in TYPES]
    + [np.float32(2.5), np.zeros((0, 3), "float32"), paddle.ones([2])],
)
def test_on_the_host_it_is_what_to_tensor_makes(array: Any) -> None:
    made, wanted = on_host(array), paddle.to_tensor(array, place=paddle.CPUPlace())
    assert (made.dtype, made.shape, made.tolist()) == (wanted.dtype, wanted.shape, wanted.tolist())
    assert made.stop_gradient and is_cpu(made.place)


def test_a_device_without_streams_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    has_streams.cache_clear()
    assert not has_streams("Place(npu:0)") and not has_streams("Place(npu:0)")
    assert capsys.readouterr().err.count("Paddle has no streams and events for Place(npu:0) here") == 1
