"""Which way is better, and a number that is not there."""

from __future__ import annotations

import pytest

from paddle_dp.callbacks import _evaluated_number
from paddle_dp.errors import UsageError
from tests.callbacks.moments import Found

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "name", ["loss", "error_rate", "val-loss", "mean_absolute_error", "perplexity", "MSE"]
)
def test_costs_should_fall(name: str) -> None:
    assert _evaluated_number.better(name, 1.0, than=2.0) and not _evaluated_number.better(name, 2.0, than=1.0)


@pytest.mark.parametrize("name", ["acc1", "acc5", "f1", "iou", "glossary"])
def test_all_else_should_rise(name: str) -> None:
    assert _evaluated_number.better(name, 2.0, than=1.0) and not _evaluated_number.better(name, 1.0, than=2.0)


def test_equal_is_not_better_and_little_is_not_enough() -> None:
    assert not _evaluated_number.better("acc1", 1.0, than=1.0)
    assert not _evaluated_number.better("acc1", 1.05, than=1.0, by=0.1) and _evaluated_number.better(
        "acc1", 1.2, than=1.0, by=0.1
    )
    assert not _evaluated_number.better("loss", 0.95, than=1.0, by=0.1) and _evaluated_number.better(
        "loss", 0.8, than=1.0, by=0.1
    )


@pytest.mark.parametrize("name", ["loss", "acc1"])
def test_what_is_not_finite_is_never_better_and_always_bettered(name: str) -> None:
    assert not any(_evaluated_number.better(name, bad, than=1.0) for bad in (NAN, INF, -INF))
    assert not _evaluated_number.better(name, NAN, than=None)
    assert _evaluated_number.better(name, 1.0, than=NAN) and _evaluated_number.better(name, 1.0, than=None)


def test_a_number_that_is_not_there_is_a_sentence(found: Found) -> None:
    assert _evaluated_number.read("acc1", found(acc1=0.5), "checkpoint.best") == 0.5
    with pytest.raises(
        UsageError, match=r"checkpoint.best: .*'acc'.*Did you mean 'acc1'\? They have acc1, loss"
    ):
        _evaluated_number.read("acc", found(acc1=0.5, loss=1.0), "checkpoint.best")
