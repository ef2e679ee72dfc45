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


FLOATS = ["float64", "float32", "float16", "bfloat16"]
KEPT = [*FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool"]
CHANGED = [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float32"), ("float32", "float64")]


@pytest.mark.parametrize(("kept", "wanted"), [*zip(KEPT, KEPT, strict=True), *CHANGED])
@pytest.mark.parametrize("shape", [[], [3], [5, 4]])
def test_a_tensor_comes_back_in_the_dtype_of_the_model(saved, kept, wanted, shape):
    """In its own, or in another one of a float that holds it, or of another run."""
    least = 0 if kept in ("uint8", "bool") else -50
    tensor = (paddle.rand(shape) * 100 + least).astype(kept)
    back = paddle.zeros(shape).astype(wanted)
    fill(back, saved(tensor), "w")
    assert back.dtype == getattr(paddle, wanted)
    np.testing.assert_array_equal(back.numpy(), tensor.astype(wanted).numpy())


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


@pytest.mark.parametrize("kept", FLOATS)
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
