"""The margin's formula against NumPy in double precision, with its gradient, its count, and what it refuses."""

import numpy as np
import paddle
import pytest

from paddle_dp.errors import LossError
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.losses.margin_softmax import Config

random = np.random.default_rng(1)


def truth(cosines, targets, angle, cosine, scale):
    """One loss a target, by the arc cosine itself."""
    moved = cosines.astype("float64")
    rows = np.arange(len(targets))
    moved[rows, targets] = np.cos(np.arccos(moved[rows, targets]) + angle) - cosine
    moved *= scale
    top = moved.max(1, keepdims=True)
    return (np.log(np.exp(moved - top).sum(1)) + top[:, 0]) - moved[rows, targets]


def drawn(samples=40, classes=9):
    return random.uniform(-0.99, 0.99, (samples, classes)).astype("float32"), random.integers(
        0, classes, samples
    )


@pytest.mark.parametrize(("angle", "cosine", "scale"), [(0.5, 0.0, 64), (0.0, 0.35, 30), (0.3, 0.1, 8)])
def test_the_total_is_the_formula_s(angle, cosine, scale):
    """Also where losses are above 64, which Paddle's own cross-entropy cuts off."""
    cosines, targets = drawn()
    wanted = truth(cosines, targets, angle, cosine, scale)
    loss = Config(angle=angle, cosine=cosine, scale=scale).build()
    total, count = loss(paddle.to_tensor(cosines), paddle.to_tensor(targets))
    assert total.item() == pytest.approx(wanted.sum(), rel=1e-6)
    assert count == 40
    assert scale < 64 or wanted.max() > 64


def test_the_gradient_is_the_formula_s():
    cosines, targets = drawn(6, 5)
    outputs = paddle.to_tensor(cosines, stop_gradient=False)
    Config(angle=0.4, cosine=0.1, scale=10).build()(outputs, paddle.to_tensor(targets))[0].backward()
    for row, column in np.ndindex(6, 5):
        ends = []
        for step in (1e-5, -1e-5):
            near = cosines.astype("float64")
            near[row, column] += step
            ends.append(truth(near, targets, 0.4, 0.1, 10).sum())
        assert outputs.grad[row, column].item() == pytest.approx(
            (ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-5
        )


def test_a_million_classes_are_added_up_exactly():
    """Paddle's logsumexp is off by 1e-3 here: it adds a million numbers of like size one after another."""
    cosines = random.normal(0, 0.125, (2, 1_000_000)).clip(-0.99, 0.99).astype("float32")
    targets = np.array([3, 700_000])
    total, _ = Config(angle=0.3, scale=32).build()(paddle.to_tensor(cosines), paddle.to_tensor(targets))
    assert total.item() == pytest.approx(truth(cosines, targets, 0.3, 0.0, 32).sum(), rel=1e-6)


def test_a_margin_of_nothing_is_cross_entropy():
    cosines, targets = map(paddle.to_tensor, drawn())
    targets[:3] = -1
    for settings in ({"ignore_index": -1}, {"ignore_index": -1, "label_smoothing": 0.2}):
        ours = Config(angle=0.0, scale=5.0, **settings).build()
        total, count = ours(cosines, targets)
        wanted, of = CrossEntropy(**settings).build()(cosines * 5, targets)
        assert total.item() == pytest.approx(wanted.item(), rel=1e-6)
        assert count.item() == of.item() == ours.count(targets).item() == 37


def test_a_sample_that_lies_on_its_class_has_a_finite_gradient():
    outputs = paddle.to_tensor([[1.0, 0.2], [-1.0, 0.3]], stop_gradient=False)
    Config().build()(outputs, paddle.to_tensor([0, 0]))[0].backward()
    assert np.isfinite(outputs.grad.numpy()).all()


def test_scores_are_without_margin():
    cosines = paddle.to_tensor([[0.5, 0.45], [0.1, 0.9]])
    assert Config().build().scores(cosines, paddle.to_tensor([0, 1]))["acc1"].item() == 2


def test_products_are_no_cosines():
    outputs, targets = map(paddle.to_tensor, drawn())
    with pytest.raises(LossError, match="takes cosines as outputs, from -1 to 1, and these reach"):
        Config().build()(outputs * 7, targets)
