"""The asymmetric loss against the paper's formula in NumPy: values, gradients, and sums over shares of a batch."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_dp.errors import RecipeError
from paddle_dp.losses.asymmetric import Asymmetric, Config
from paddle_dp.part import read_part

random = np.random.default_rng(0)
OUTPUTS = random.normal(0, 3, (40, 5))
TARGETS = random.integers(0, 2, (40, 5)).astype("float64")


def formula(x: np.ndarray, y: np.ndarray, config: Config, focus: np.ndarray | None = None) -> float:
    """The loss of arXiv:2009.14119, over all labels; the powers are of the outputs `focus`, if they are fixed."""
    p, powers = (1 / (1 + np.exp(-each)) for each in (x, x if focus is None else focus))
    q, q_powers = (np.maximum(each - config.margin, 0) for each in (p, powers))
    positive = (1 - powers) ** config.gamma_positive * np.log(p)
    negative = q_powers**config.gamma_negative * np.log(1 - q)
    return float(-(y * positive + (1 - y) * negative).sum())


def total(config: Config, outputs: np.ndarray, targets: np.ndarray) -> float:
    return float(config.build()(paddle.to_tensor(outputs), paddle.to_tensor(targets))[0])


CASES = [
    Config(),
    Config(gamma_positive=1.0, gamma_negative=4.0, margin=0.05),
    Config(gamma_positive=2.0, gamma_negative=1.0, margin=0.0),
    Config(gamma_positive=0.0, gamma_negative=0.0, margin=0.0),
    Config(gamma_positive=0.0, gamma_negative=0.0, margin=0.2, through_focus=True),
    Config(gamma_positive=1.5, gamma_negative=3.0, margin=0.1, through_focus=True),
]


@pytest.mark.parametrize("config", CASES)
def test_values_and_gradients_are_the_formulas(config: Config) -> None:
    outputs = paddle.to_tensor(OUTPUTS, stop_gradient=False)
    loss, count = config.build()(outputs, paddle.to_tensor(TARGETS))
    assert count == 40
    assert float(loss) == pytest.approx(formula(OUTPUTS, TARGETS, config) / 5, rel=1e-12)
    loss.backward()
    assert outputs.grad is not None
    focus, step = (None if config.through_focus else OUTPUTS), 1e-5
    for row, column in [(0, 0), (3, 2), (17, 4), (39, 1)]:
        moved = np.zeros_like(OUTPUTS)
        moved[row, column] = step
        ends = [formula(OUTPUTS + sign * moved, TARGETS, config, focus) / 5 for sign in (1, -1)]
        assert float(outputs.grad[row, column]) == pytest.approx(
            (ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-9
        )


def test_without_powers_and_margin_it_is_binary_cross_entropy() -> None:
    plain = read_part("losses", {"use": "binary_cross_entropy"}).config.build()
    expected = float(plain(paddle.to_tensor(OUTPUTS), paddle.to_tensor(TARGETS))[0])
    assert total(CASES[3], OUTPUTS, TARGETS) == pytest.approx(expected, rel=1e-12)


def test_totals_of_unequal_shares_add_up_also_as_sums_over_labels_and_of_mixed_labels() -> None:
    whole = total(Config(), OUTPUTS, TARGETS)
    assert total(Config(), OUTPUTS[:7], TARGETS[:7]) + total(
        Config(), OUTPUTS[7:], TARGETS[7:]
    ) == pytest.approx(whole, rel=1e-13)
    assert total(Config(over_labels="sum"), OUTPUTS, TARGETS) == pytest.approx(5 * whole, rel=1e-13)
    mixed = 0.3 * TARGETS + 0.7 * TARGETS[::-1]
    assert total(Config(), OUTPUTS, mixed) == pytest.approx(formula(OUTPUTS, mixed, Config()) / 5, rel=1e-12)
    assert total(Config(), OUTPUTS[:, 0], TARGETS[:, 0]) == pytest.approx(
        formula(OUTPUTS[:, 0], TARGETS[:, 0], Config()), rel=1e-12
    )


@pytest.mark.parametrize("config", CASES)
def test_outputs_that_saturate_have_finite_numbers_and_gradients(config: Config) -> None:
    outputs = paddle.to_tensor([[-200.0, 200.0, -200.0, 200.0, 0.0]], "float32", stop_gradient=False)
    loss, _ = config.build()(outputs, paddle.to_tensor([[1.0, 1.0, 0.0, 0.0, 0.0]]))
    loss.backward()
    assert outputs.grad is not None and np.isfinite(outputs.grad.numpy()).all() and np.isfinite(float(loss))


def test_autocast_does_not_reach_it_and_the_score_is_counted() -> None:
    outputs, targets = (paddle.to_tensor(each.astype("float32")) for each in (OUTPUTS, TARGETS))
    loss = Config().build()
    assert isinstance(loss, Asymmetric)
    with paddle.amp.auto_cast(True, level="O2", dtype="bfloat16"):
        cast = loss(outputs, targets)[0]
    assert cast.dtype == paddle.float32 and cast.item() == loss(outputs, targets)[0].item()
    hits = ((OUTPUTS > 0) == (TARGETS > 0.5)).sum() / 5
    assert loss.scores(outputs, targets)["acc1"].item() == pytest.approx(hits, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma_negative": 0.5}, "loss.gamma_negative: between 0 and 1 its gradient has no limit"),
        ({"gamma_positive": -1.0}, "loss.gamma_positive: -1.0 is less than 0"),
        ({"margin": 1.0}, "loss.margin: 1.0 is not less than 1"),
    ],
)
def test_settings_without_a_gradient_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_part("losses", {"use": "asymmetric", **settings})
    assert message in str(error.value)
