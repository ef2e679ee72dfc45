"""Scores by their names, and the interval of a share, against the textbook's formula and its known values."""

from __future__ import annotations

import math

import pytest

from paddle_dp.scores import interval, smaller_is_better, standard_error


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [(0.5, 10, 0.2366, 0.7634), (1.0, 360, 0.98944, 1.0), (0.0, 20, 0.0, 0.16113), (355 / 360, 360, 0.96793, 0.99405)],
)  # fmt: skip
def test_wilsons_interval(share: float, count: int, low: float, high: float) -> None:
    assert interval(share, count) == pytest.approx((low, high), abs=1e-4)


def test_the_interval_covers_the_share_in_19_of_20_draws() -> None:
    import numpy as np

    draws = np.random.default_rng(0).binomial(200, 0.93, 4000)
    covered = np.mean([low <= 0.93 <= high for low, high in (interval(hits / 200, 200) for hits in draws)])
    assert 0.93 < covered < 0.97


def test_the_standard_error_is_binomial() -> None:
    assert standard_error(0.9, 100) == pytest.approx(math.sqrt(0.9 * 0.1 / 100))


def test_costs_fall_and_scores_rise() -> None:
    assert smaller_is_better("val_loss") and smaller_is_better("ema_perplexity")
    assert not smaller_is_better("acc1") and not smaller_is_better("glossary")
