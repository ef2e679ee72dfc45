"""Cross-entropy against NumPy: totals, counts, smoothing, ignored targets, scores, and the precision of all that."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.core.loss import as_loss
from paddle_dp.errors import LossError, TargetError
from paddle_dp.losses.cross_entropy import Config

random = np.random.default_rng(0)


def log_softmax(outputs: np.ndarray) -> np.ndarray:
    shifted = outputs.astype("float64") - outputs.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def each(outputs: np.ndarray, targets: np.ndarray, smoothing: float = 0.0) -> np.ndarray:
    """One loss a target."""
    logs = log_softmax(outputs)
    own = -np.take_along_axis(logs, targets[..., None].clip(0), -1)[..., 0]
    return (1 - smoothing) * own - smoothing * logs.mean(-1)


def drawn(*shape: int, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    return random.normal(0, 3, (*shape, classes)).astype("float32"), random.integers(0, classes, shape)


def answer(outputs: Any, targets: Any, **settings: Any) -> tuple[float, Any]:
    total, count = Config(**settings).build()(paddle.to_tensor(outputs), paddle.to_tensor(targets))
    assert total.shape == []
    assert total.dtype == paddle.float32
    return total.item(), count


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(33,), (4, 7)])
def test_the_total_is_the_sum_over_samples_of_the_mean_of_their_targets(
    smoothing: float, shape: tuple[int, ...]
) -> None:
    outputs, targets = drawn(*shape)
    total, count = answer(outputs, targets, label_smoothing=smoothing)
    losses = each(outputs, targets, smoothing).reshape(shape[0], -1)
    assert total == pytest.approx(losses.mean(1).sum(), rel=1e-6)
    assert count == shape[0]
    assert not hasattr(Config(label_smoothing=smoothing).build(), "count")


@pytest.mark.parametrize("ignored", [-1, -100, 0, 3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(40,), (5, 8)])
def test_ignored_targets_do_not_count(ignored: int, smoothing: float, shape: tuple[int, ...]) -> None:
    outputs, targets = drawn(*shape)
    targets[random.random(shape) < 0.4] = ignored
    kept = targets != ignored
    total, count = answer(outputs, targets, ignore_index=ignored, label_smoothing=smoothing)
    assert total == pytest.approx(each(outputs, targets, smoothing)[kept].sum(), rel=1e-6)
    assert count.item() == kept.sum()
    loss = Config(ignore_index=ignored).build()
    assert loss.count(paddle.to_tensor(targets)).item() == kept.sum()
    assert loss.count(paddle.to_tensor(targets)).shape == []


def test_a_batch_that_is_ignored_whole_is_nothing_over_nothing() -> None:
    outputs, targets = drawn(6)
    total, count = answer(outputs, np.full_like(targets, -1), ignore_index=-1, label_smoothing=0.1)
    assert (total, count.item()) == (0.0, 0)


@pytest.mark.parametrize("ignored", [None, -1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_gradient_is_softmax_less_target(ignored: int | None, smoothing: float) -> None:
    numbers, targets = drawn(12)
    if ignored is not None:
        targets[:4] = ignored
    outputs = paddle.to_tensor(numbers, stop_gradient=False)
    Config(label_smoothing=smoothing, ignore_index=ignored).build()(outputs, paddle.to_tensor(targets))[
        0
    ].backward()
    wanted = np.exp(log_softmax(numbers)) - ((1 - smoothing) * np.eye(10)[targets] + smoothing / 10)
    wanted[targets == ignored] = 0
    np.testing.assert_allclose(outputs.grad.numpy(), wanted, atol=1e-6)


def test_scores_count_the_best_and_the_best_five() -> None:
    outputs, targets = drawn(200)
    order = outputs.argsort(-1)[:, ::-1]
    scores = Config().build().scores(paddle.to_tensor(outputs), paddle.to_tensor(targets))
    assert {name: score.item() for name, score in scores.items()} == {
        "acc1": (order[:, 0] == targets).sum(),
        "acc5": (order[:, :5] == targets[:, None]).any(1).sum(),
    }
    assert all(score.shape == [] for score in scores.values())


@pytest.mark.parametrize(("classes", "names"), [(2, {"acc1"}), (5, {"acc1"}), (6, {"acc1", "acc5"})])
def test_the_best_five_of_five_are_no_score(classes: int, names: set[str]) -> None:
    outputs, targets = map(paddle.to_tensor, drawn(8, classes=classes))
    assert set(Config().build().scores(outputs, targets)) == names


def test_scores_are_over_the_loss_s_own_count() -> None:
    outputs, targets = drawn(5, 8)
    best = outputs.argmax(-1) == targets
    tensors = paddle.to_tensor(outputs), paddle.to_tensor(targets)
    assert Config().build().scores(*tensors)["acc1"].item() == pytest.approx(best.mean(1).sum())
    for ignored in (0, -1):
        scores = Config(ignore_index=ignored).build().scores(*tensors)
        five = (outputs.argsort(-1)[..., -5:] == targets[..., None]).any(-1)
        assert scores["acc1"].item() == best[targets != ignored].sum()
        assert scores["acc5"].item() == five[targets != ignored].sum()


@pytest.mark.parametrize(
    "settings", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "ignore_index": 1}]
)
def test_targets_may_be_a_column_and_any_whole_numbers(settings: dict[str, Any]) -> None:
    outputs, targets = drawn(9)
    plain = answer(outputs, targets, **settings)[0]
    assert answer(outputs, targets[:, None], **settings)[0] == plain
    for kind in ("int32", "uint8", "int16"):
        assert answer(outputs, targets.astype(kind), **settings)[0] == plain


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize(
    "settings", [{}, {"label_smoothing": 0.1}, {"label_smoothing": 0.1, "ignore_index": 1}]
)
def test_autocast_does_not_reach_the_total(level: str, settings: dict[str, Any]) -> None:
    outputs, targets = map(paddle.to_tensor, drawn(300))
    loss = Config(**settings).build()
    low = outputs.astype("bfloat16")
    with paddle.amp.auto_cast(True, level=level, dtype="bfloat16"):
        cast, scores, exact = loss(low, targets)[0], loss.scores(outputs, targets), loss(outputs, targets)[0]
    assert cast.dtype == exact.dtype == paddle.float32
    assert exact.item() == loss(outputs, targets)[0].item()
    assert cast.item() == loss(low.astype("float32"), targets)[0].item()
    assert scores["acc5"].item() == loss.scores(outputs, targets)["acc5"].item()


def test_targets_with_fractions_are_refused() -> None:
    outputs, targets = drawn(3)
    with pytest.raises(LossError, match="takes class numbers as targets, not"):
        answer(outputs, targets.astype("float32"))


@pytest.mark.parametrize("unknown", [-100, 10])
def test_a_target_of_no_class_is_an_error_not_silence(unknown: int) -> None:
    outputs, targets = drawn(3)
    targets[2] = unknown
    with pytest.raises(
        TargetError, match=rf"target {unknown} is no class: the 10 classes .* are 0 to 9"
    ) as caught:
        answer(outputs, targets)
    assert (caught.value.row, caught.value.value) == (2, unknown)


def test_a_target_of_no_class_beside_one_that_is_left_out() -> None:
    outputs, targets = drawn(4)
    targets[:2] = -1, -7
    loss = Config(ignore_index=-1).build()
    with pytest.raises(TargetError, match=r"target -7 is no class.* and loss.ignore_index is -1") as caught:
        loss(paddle.to_tensor(outputs), paddle.to_tensor(targets))
    assert caught.value.row == 1


def test_scores_take_int32_too() -> None:
    outputs, targets = (paddle.to_tensor(array) for array in drawn(8))
    loss = Config().build()
    wanted, found = (loss.scores(outputs, targets.astype(kind)) for kind in ("int64", "int32"))
    assert {name: score.item() for name, score in found.items()} == {n: s.item() for n, s in wanted.items()}


@pytest.mark.parametrize("shape", [(6,), (3, 4)])
def test_it_is_paddle_s_own_to_the_bit(shape: tuple[int, ...]) -> None:
    """The kernel is called without what Paddle's function puts around it."""
    array, numbers = drawn(*shape)
    numbers.flat[0] = -1
    found = []
    for loss in (
        lambda outputs, targets: Config(ignore_index=-1).build()(outputs, targets)[0],
        partial(paddle.nn.functional.cross_entropy, ignore_index=-1, reduction="sum"),
    ):
        outputs = paddle.to_tensor(array, stop_gradient=False)
        total = loss(outputs, paddle.to_tensor(numbers))
        total.backward()
        found.append((total.numpy().tobytes(), outputs.grad.numpy().tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("classes", [2, 8, 10, 64, 200, 300, 1000])
@pytest.mark.parametrize("where", ["everywhere", "in a row", "in a column", "at a target"])
@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"ignore_index": 1}], ids=str)
def test_nan_in_the_outputs_is_nan_in_the_loss(classes: int, where: str, settings: dict[str, Any]) -> None:
    """Paddle's kernel on CPUs gives log(classes), for some numbers of classes."""
    outputs = np.zeros((8, classes), "float32")
    rows = {"everywhere": np.s_[:], "in a row": 3, "in a column": np.s_[:, 1], "at a target": np.s_[3, 0]}
    outputs[rows[where]] = np.nan
    total, count = answer(outputs, np.zeros(8, "int64"), **settings)
    assert np.isnan(total) and count == 8


def test_nan_in_a_row_that_does_not_count_is_none() -> None:
    outputs = np.zeros((4, 200), "float32")
    outputs[1] = np.nan
    total, count = answer(outputs, np.array([0, 7, 0, 0]), ignore_index=7)
    assert total == pytest.approx(3 * np.log(200)) and count.item() == 3
    loss = as_loss(paddle.nn.CrossEntropyLoss(reduction="none", ignore_index=7))
    assert np.isfinite(loss(paddle.to_tensor(outputs), paddle.to_tensor([0, 7, 0, 0]))[0].item())


def test_a_class_that_a_model_rules_out_by_minus_infinity_is_no_nan() -> None:
    outputs = np.zeros((8, 200), "float32")
    outputs[:, 7], outputs[0, 3] = -np.inf, 3e38
    assert np.isfinite(answer(outputs[1:], np.zeros(7, "int64"))[0])
    assert np.isfinite(answer(outputs[:, :100], np.full(8, 3), ignore_index=5)[0])


def test_several_outputs_are_refused_by_what_to_do() -> None:
    outputs, targets = (paddle.to_tensor(array) for array in drawn(3))
    with pytest.raises(LossError, match="a tuple of 2 outputs, and cross_entropy takes one tensor"):
        Config().build()((outputs, outputs), targets)
