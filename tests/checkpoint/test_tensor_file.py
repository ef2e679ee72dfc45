from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from paddle_dp.checkpoint.shards import DTYPES, TensorShard
from paddle_dp.checkpoint.tensor_file import read_header, read_rows, write_tensors


def _array(label: str, shape: tuple[int, ...]) -> np.ndarray:
    raw = np.random.default_rng(3).integers(0, 2, (*shape, np.dtype(DTYPES[label][1]).itemsize), np.uint8)
    return raw.view(DTYPES[label][1]).reshape(shape)


@pytest.mark.parametrize("label", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)])
def test_every_dtype_and_shape_comes_back(tmp_path, label, shape):
    array = _array(label, shape)
    write_tensors(tmp_path / "f", {"x": TensorShard.full("x", array, label)})
    info = read_header(tmp_path / "f")["x"]
    back = read_rows(tmp_path / "f", info)
    assert (info.dtype, back.shape, back.dtype) == (label, shape, array.dtype)
    assert back.tobytes() == array.tobytes()


def test_the_safetensors_package_reads_the_file(tmp_path):
    """The format is a promise to others: every tensor is read by the reference implementation, bfloat16 as such."""
    arrays = {label: _array(label, (3, 2)) for label in DTYPES} | {"empty": np.zeros((0, 2))}
    write_tensors(
        tmp_path / "f", {k: TensorShard.full(k, a, k if k in DTYPES else "") for k, a in arrays.items()}
    )
    there = dict(safetensors.deserialize((tmp_path / "f").read_bytes()))
    for key, array in arrays.items():
        assert bytes(there[key]["data"]) == array.tobytes()
        assert (there[key]["dtype"], there[key]["shape"]) == (DTYPES.get(key, ("F64",))[0], list(array.shape))
    with open(tmp_path / "f", "rb") as file:
        assert struct.unpack("<Q", file.read(8))[0] % 8 == 0


def test_a_file_of_the_safetensors_package_is_read(tmp_path):
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.ones((), np.float16)}
    safetensors.numpy.save_file(arrays, tmp_path / "f", metadata={"made": "by others"})
    entries = read_header(tmp_path / "f")
    for key, array in arrays.items():
        np.testing.assert_array_equal(read_rows(tmp_path / "f", entries[key]), array)


def test_paddle_reads_bfloat16_from_the_file(tmp_path):
    paddle = pytest.importorskip("paddle")
    from safetensors.paddle import load_file

    bits = paddle.to_tensor([1.5, -2.0, 3e38]).astype("bfloat16").numpy()
    write_tensors(tmp_path / "f", {"x": TensorShard.full("x", bits, "bfloat16")})
    assert load_file(tmp_path / "f")["x"].dtype == paddle.bfloat16
    np.testing.assert_array_equal(load_file(tmp_path / "f")["x"].numpy(), bits)


def test_an_array_that_is_not_contiguous_is_written_by_value(tmp_path):
    array = np.arange(12.0).reshape(3, 4).T[::2]
    write_tensors(tmp_path / "f", {"x": TensorShard.full("x", array)})
    np.testing.assert_array_equal(read_rows(tmp_path / "f", read_header(tmp_path / "f")["x"]), array)


def test_some_rows_are_read_without_the_others(tmp_path):
    array = np.arange(12.0).reshape(4, 3)
    write_tensors(tmp_path / "f", {"x": TensorShard.full("x", array), "y": TensorShard.full("y", array)})
    info = read_header(tmp_path / "f")["y"]
    np.testing.assert_array_equal(read_rows(tmp_path / "f", info, slice(1, 3)), array[1:3])


def test_what_was_read_is_not_the_file(tmp_path):
    """A memory-mapped tensor would change under the model when the file is overwritten in place."""
    write_tensors(tmp_path / "f", {"x": TensorShard.full("x", np.ones(4))})
    array = read_rows(tmp_path / "f", read_header(tmp_path / "f")["x"])
    (tmp_path / "f").write_bytes(b"\0" * (tmp_path / "f").stat().st_size)
    assert array.sum() == 4 and array.flags.writeable and not isinstance(array, np.memmap)
    with open("/proc/self/maps") as maps:
        assert str(tmp_path / "f") not in maps.read()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F99"},
        {"shape": [5]},
        {"shape": [-4]},
        {"data_offsets": [0, 10**9]},
        {"data_offsets": [-32, 0]},
        {"data_offsets": [1]},
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, change):
    tensor = {"dtype": "F64", "shape": [4], "data_offsets": [0, 32], **change}
    text = json.dumps({"x": tensor}).encode()
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
    with pytest.raises((ValueError, KeyError)):
        read_header(tmp_path / "f")


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"\xff" * 8, struct.pack("<Q", 10**12), struct.pack("<Q", 2) + b"[]"]
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises((ValueError, TypeError, AttributeError)):
        read_header(tmp_path / "f")
