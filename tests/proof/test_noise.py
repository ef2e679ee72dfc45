"""Changes that mathematics does not see."""

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.core.precision import Rounder
from paddle_dp.proof import noise


def net():
    paddle.seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1D(8), nn.ReLU(), nn.Linear(8, 3))


def test_weights_move_by_their_last_place_and_seeds_differ():
    a, b, c = net(), net(), net()
    noise.nudge(b, "float32", 1)
    noise.nudge(c, "float32", 2)
    old, new, other = (model[0].weight.numpy() for model in (a, b, c))
    assert (old != new).any() and (new != other).any()
    assert np.abs(new / old - 1).max() <= 2.0**-22


def test_permuted_samples_are_the_same_samples():
    x = paddle.arange(12, dtype="float32").reshape([6, 2])
    batch = Batch((MicroBatch(x, paddle.arange(6), 6),), 6, 0, 0)
    moved = noise.permute(
        batch, next(one.order for one in noise.kinds("float32", 2) if one.order)
    ).micro_batches[0]
    places = moved.targets.numpy()
    assert sorted(places) == list(range(6)) and list(places) != list(range(6))
    assert (moved.inputs.numpy() == x.numpy()[places]).all()


def gradient(model, parts=None, dtype="bfloat16"):
    if dtype:
        Rounder(model, dtype).active = True
    if parts:
        noise.in_shares(model, parts)
    x = paddle.to_tensor(np.random.default_rng(0).normal(size=(7, 4)).astype("float32"))
    model(x).square().sum().backward()
    return model[0].weight.grad.numpy()


def test_products_in_shares_round_each_share_s_gradient_as_ranks_do():
    """BatchNorm in between still sees all samples, so without rounding nothing changes."""
    whole, parts = gradient(net()), gradient(net(), 2)
    relative = np.linalg.norm(parts - whole) / np.linalg.norm(whole)
    assert 1e-4 < relative < 3e-2
    exact = [gradient(net(), n, None) for n in (None, 2)]
    assert np.linalg.norm(exact[0] - exact[1]) <= 1e-6 * np.linalg.norm(exact[0])


def convolutions():
    paddle.seed(0)
    return nn.Sequential(nn.Conv2D(4, 6, 3), nn.Conv2D(6, 3, 2, stride=2))


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize(
    ("made", "shape", "count", "relative"), [(net, (7, 4), 7, False), (convolutions, (2, 4, 7, 7), 5, True)]
)
def test_products_in_blocks_are_the_same_products(made, shape, count, relative, parts):
    """In exact arithmetic; rounded, they are another sum, of the inputs and of their gradients."""

    def gradients(blocks):
        model = made()
        model.to(dtype="float64")
        if blocks:
            noise.in_blocks(model, blocks)
        x = paddle.to_tensor(np.random.default_rng(0).normal(size=shape), stop_gradient=False)
        model(x).square().sum().backward()
        return [x.grad.numpy(), *(p.grad.numpy() for p in model.parameters() if p.grad is not None)]

    pairs = list(zip(gradients(0), gradients(parts), strict=True))
    assert len(pairs) == count
    assert all(np.abs(a - b).max() <= 1e-12 * (np.abs(a).max() if relative else 1.0) for a, b in pairs)
    assert any((a != b).any() for a, b in pairs)


@pytest.mark.parametrize(
    ("dtype", "tensor", "count"),
    [("float64", 1, 4), ("float32", 2, 4), ("bfloat16", 1, 7), ("bfloat16", 2, 9), ("float16", 3, 9)],
)
def test_low_precision_is_given_more_runs(dtype, tensor, count):
    assert len(list(noise.kinds(dtype, 3, tensor))) == count


def test_a_parameter_of_no_dims_moves_too():
    """CLIP's logit scale: NumPy's product of a 0-d array is a number, which no parameter takes."""
    model = nn.Layer()
    model.scale = model.create_parameter([], default_initializer=nn.initializer.Constant(2.6592))
    noise.nudge(model, "float32", 1)
    assert 0 < abs(float(model.scale) - 2.6592) < 1e-6


def test_a_dummy_stays_as_it_is():
    """Of a batch of fewer samples than micro-batches: it counts nowhere, and a loss gets its one row."""
    x = paddle.ones([1, 2])
    dummy = MicroBatch(x, paddle.zeros([1], "int64"), 0)
    order = next(one.order for one in noise.kinds("float32", 2) if one.order)
    assert noise.permute(Batch((dummy,), 6, 0, 0), order).micro_batches == (dummy,)
