from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_dp.checkpoint import Snapshot, fill, load, put, save, tensor_shard
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import Mesh


@pytest.fixture
def saved(tmp_path):
    def of(tensor):
        tensors = {"w": tensor_shard("w", tensor)}
        return load(save(Snapshot(tensors=tensors, state={"progress": {"step": 1}}), tmp_path, Mesh.alone()))

    return of


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
@pytest.mark.parametrize("shape", [[], [3], [2, 3]])
def test_a_tensor_comes_back_with_its_dtype(saved, dtype, shape):
    tensor = (paddle.rand(shape) * 3).astype(dtype)
    back = paddle.zeros(shape).astype(dtype)
    fill(back, saved(tensor), "w")
    assert back.dtype == tensor.dtype
    np.testing.assert_array_equal(back.numpy(), tensor.numpy())


def test_a_piece_does_not_follow_the_live_tensor():
    tensor = paddle.ones([3])
    kept = tensor_shard("w", tensor)
    tensor.add_(paddle.ones([3]))
    assert kept.array.tolist() == [1, 1, 1]


def test_a_parameter_stays_the_one_the_optimizer_holds(saved):
    parameter = paddle.nn.Linear(2, 2).weight
    name = parameter.name
    fill(parameter, saved(paddle.ones([2, 2])), "w")
    assert (parameter.name, parameter.stop_gradient, parameter.numpy().sum()) == (name, False, 4)


def test_a_box_fills_this_ranks_part(saved):
    whole = paddle.arange(12, dtype="float32").reshape([4, 3])
    part = paddle.zeros([2, 2])
    fill(part, saved(whole), "w", whole.shape, (2, 1))
    np.testing.assert_array_equal(part.numpy(), whole.numpy()[2:, 1:])
    assert tensor_shard("w", part, (4, 3), (2, 1)).box.stop == (4, 3)


def test_another_shape_or_dtype_is_refused(saved):
    opened = saved(paddle.ones([2, 3]))
    with pytest.raises(CheckpointError, match=r"w is \[2, 3\] in .* and \[3, 2\] in this model"):
        fill(paddle.ones([3, 2]), opened, "w")
    with pytest.raises(CheckpointError, match=r"w is float32 in .* and int64 in this model"):
        fill(paddle.ones([2, 3], "int64"), opened, "w")
    with pytest.raises(CheckpointError, match=r"w is float64 \[2\] in the checkpoint and float32 \[3\] here"):
        put(paddle.ones([3]), np.ones(2), "w")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [[], [5, 4]])
def test_16_bit_floats_fill_a_float32_tensor_as_they_are(saved, dtype, shape):
    tensor = (paddle.randn(shape) * 100).astype(dtype)
    wide = paddle.zeros(shape)
    fill(wide, saved(tensor), "w")
    np.testing.assert_array_equal(wide.numpy(), tensor.astype("float32").numpy())


@pytest.mark.parametrize(("kept", "wanted"), [("float64", "float32"), ("float32", "float64")])
def test_a_run_may_change_between_float32_and_float64(saved, kept, wanted):
    tensor = paddle.randn([5], dtype=kept)
    other = paddle.zeros([5], wanted)
    fill(other, saved(tensor), "w")
    np.testing.assert_array_equal(other.numpy(), tensor.astype(wanted).numpy())


@pytest.mark.parametrize("kept", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float16", "bfloat16"])
@pytest.mark.parametrize("shape", [[], [5, 4]])
def test_a_model_in_16_bits_has_the_nearest_numbers(saved, kept, wanted, shape):
    tensor = (paddle.randn(shape) * 100).astype(kept)
    low = paddle.zeros(shape).astype(wanted)
    fill(low, saved(tensor), "w")
    nearest = tensor.astype("float32").astype(wanted)
    assert (low.astype("float32") == nearest.astype("float32")).all()


def test_what_float16_does_not_hold_is_refused(saved):
    opened = saved(paddle.to_tensor([1.0, 1e6]))
    with pytest.raises(CheckpointError, match=r"w is too large in .* for float16"):
        fill(paddle.zeros([2]).astype("float16"), opened, "w")
