"""Which way is better, and a number that is not there."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from paddle_dp.callbacks import _evaluated_number, checkpoint, early_stop
from paddle_dp.errors import UsageError
from paddle_dp.train import Callback, Run
from tests.callbacks.moments import At, Found

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


def test_a_number_of_no_held_out_samples_is_refused(run: Run, at: At) -> None:
    """Nothing was kept, or stopped, and no line said so."""
    for config, setting, superfluous in (
        (checkpoint.Config(best="loss"), "checkpoint.best", "checkpoint.best"),
        (early_stop.Config(), "early_stop.watch", "early_stop"),
    ):
        with pytest.raises(
            UsageError, match=rf"^callbacks\.{setting}: loss is .* or leave {superfluous} out\."
        ):
            config.build(dataclasses.replace(run, test_loader=None)).refuse(at("refuse", 0))


class Own(Callback):
    """A callback of the user's, which may evaluate."""


def test_a_number_that_nothing_evaluates_is_refused_where_no_other_code_can(
    run: Run, at: At, trainer: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    with_recipe = dataclasses.replace(run, recipe=SimpleNamespace())  # type: ignore[arg-type]
    saves = checkpoint.Config(best="acc1").build(with_recipe)
    saves.refuse(at("refuse", 0))
    trainer.callbacks = [saves]
    with pytest.raises(
        UsageError, match=r"^callbacks\.checkpoint\.best: nothing evaluates acc1: add evaluate to "
    ):
        saves.refuse(at("refuse", 0))
    trainer.plateau = object()
    saves.refuse(at("refuse", 0))
    assert not capsys.readouterr().err
    trainer.plateau = None
    for run_with, callbacks in ((with_recipe, [saves, Own()]), (run, [saves])):
        trainer.callbacks = callbacks
        checkpoint.Config(best="acc1").build(run_with).refuse(at("refuse", 0))
        assert (
            "nothing evaluates acc1, unless your code calls trainer.evaluate(): add"
            in capsys.readouterr().err
        )
