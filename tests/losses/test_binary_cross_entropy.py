"""Binary cross-entropy against scikit-learn's log loss, and its score against counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.errors import DataError, LossError
from paddle_dp.losses.asymmetric import Config as Asymmetric
from paddle_dp.losses.binary_cross_entropy import Config

random = np.random.default_rng(0)


def drawn(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    return random.normal(0, 2, shape).astype("float32"), random.integers(0, 2, shape)


@pytest.mark.parametrize("shape", [(30,), (30, 1), (30, 4)])
@pytest.mark.parametrize("positive", [1.0, 2.5])
def test_the_total_is_scikit_learns_over_samples(shape: tuple[int, ...], positive: float) -> None:
    from sklearn.metrics import log_loss

    outputs, targets = drawn(*shape)
    total, count = Config(positive_weight=positive).build()(
        paddle.to_tensor(outputs), paddle.to_tensor(targets)
    )
    said = 1 / (1 + np.exp(-outputs.astype("float64").ravel()))
    weight = np.where(targets.ravel(), positive, 1.0)
    wanted = log_loss(targets.ravel(), said, sample_weight=weight, normalize=False) / (targets.size / 30)
    assert total.item() == pytest.approx(wanted, rel=1e-6)
    assert (count, total.shape, total.dtype) == (30, [], paddle.float32)


@pytest.mark.parametrize("shape", [(30,), (30, 4)])
def test_the_score_is_the_share_of_labels_that_are_right(shape: tuple[int, ...]) -> None:
    from sklearn.metrics import accuracy_score

    outputs, targets = drawn(*shape)
    scores = Config().build().scores(paddle.to_tensor(outputs), paddle.to_tensor(targets))
    wanted = accuracy_score(targets.ravel(), outputs.ravel() > 0) * 30
    assert {name: score.item() for name, score in scores.items()} == {"acc1": pytest.approx(wanted)}


def test_losses_of_labels_may_be_added_up_and_shares_of_three_labels_too() -> None:
    outputs, targets = map(paddle.to_tensor, drawn(30, 3))
    mean, added = (Config(over_labels=how).build()(outputs, targets) for how in ("mean", "sum"))
    assert added[0].item() == pytest.approx(3 * mean[0].item(), rel=1e-6) and added[1] == mean[1] == 30
    single = Config(over_labels="sum").build()(outputs[:, 0], targets[:, 0])[0]
    assert single.item() == Config().build()(outputs[:, 0], targets[:, 0])[0].item()
    loss, wide = Config().build(), outputs.astype("float64")
    parts = [
        loss.scores(wide[slice(*part)], targets[slice(*part)])["acc1"].item() for part in ((0, 7), (7, 30))
    ]
    assert sum(parts) == pytest.approx(loss.scores(wide, targets)["acc1"].item(), rel=1e-15)


@pytest.mark.parametrize("of", [Config, Asymmetric])
def test_the_losses_of_masks_are_added_up_over_all_pixels(of: Any) -> None:
    outputs, targets = map(paddle.to_tensor, drawn(5, 3, 4))
    mean, added = (of(over_labels=how).build()(outputs, targets)[0].item() for how in ("mean", "sum"))
    assert added == pytest.approx(12 * mean, rel=1e-6)


def test_one_output_a_sample_meets_a_row_of_targets() -> None:
    outputs, targets = drawn(30)
    loss = Config().build()
    column = loss(paddle.to_tensor(outputs[:, None]), paddle.to_tensor(targets))[0]
    assert column.item() == loss(paddle.to_tensor(outputs), paddle.to_tensor(targets))[0].item()


def test_autocast_reaches_neither_total_nor_score() -> None:
    outputs, targets = map(paddle.to_tensor, drawn(300, 3))
    loss = Config().build()
    with paddle.amp.auto_cast(True, level="O2", dtype="bfloat16"):
        total, scores = loss(outputs, targets)[0], loss.scores(outputs, targets)
    assert total.item() == loss(outputs, targets)[0].item()
    assert scores["acc1"].item() == loss.scores(outputs, targets)["acc1"].item()


FREQUENCIES = (0.5, 0.02, 1.0)


@pytest.mark.parametrize("summed", ["mean", "sum"])
def test_rare_labels_count_by_their_frequency(summed: str) -> None:
    outputs, targets = drawn(30, 3)
    config = Config(frequencies=FREQUENCIES, over_labels=summed)  # type: ignore[arg-type]
    shares, x, targets = np.array(FREQUENCIES), outputs.astype("float64"), targets.astype("float64")
    total, count = config.build()(paddle.to_tensor(x), paddle.to_tensor(targets))
    losses = np.where(targets, np.log1p(np.exp(-x)), np.log1p(np.exp(x)))
    wanted = (losses * np.exp(np.where(targets, 1 - shares, shares))).sum() / (3 if summed == "mean" else 1)
    assert total.item() == pytest.approx(wanted, rel=1e-12) and count == 30
    parts = [config.build()(*(paddle.to_tensor(each[k]) for each in (x, targets)))[0].item()
             for k in (slice(0, 11), slice(11, 30))]  # fmt: skip
    assert sum(parts) == pytest.approx(total.item(), rel=1e-13)


def test_frequencies_are_counted_in_a_list(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a b.jpg\t0,1,1\nc.jpg\t0,0,1\n\nd.jpg 1,0,1\ne.jpg 0,0,1\n")
    assert Config(frequencies=str(tmp_path / "list.txt")).build().frequencies == (0.25, 0.25, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a.jpg 0,1\nb.jpg 0,1,1\n", "image 2 of .* has no 2 labels"), ("a.jpg 3\n", "image 1 of .* has no 1 labels"),
     ("0,1\n", "image 1"), ("", "lists no image"), (None, "cannot be read as a list")],
)  # fmt: skip
def test_a_list_without_labels_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "list.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        Config(frequencies=str(tmp_path / "list.txt")).build()


def test_another_number_of_labels_is_refused() -> None:
    outputs, targets = map(paddle.to_tensor, drawn(30, 4))
    with pytest.raises(LossError, match=r"loss\.frequencies has 3 numbers, and outputs have 4 labels"):
        Config(frequencies=FREQUENCIES).build()(outputs, targets)
