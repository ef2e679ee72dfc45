"""A metric that fails ends the training after its checkpoint, not before; one that does not fit, before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle
import pytest

from paddle_dp import Trainer
from paddle_dp.checkpoint import checkpoints
from paddle_dp.errors import UsageError
from tests.metrics.test_on_ranks import ROWS


def trainer(folder: Path, callbacks: Any = ("evaluate", "checkpoint"), **settings: Any) -> Trainer:
    return Trainer.of(
        model=paddle.nn.Linear(5, 5), train=ROWS, test=ROWS, batch=6, loss="cross_entropy", optimizer="sgd",
        folder=folder, length="2 epochs", callbacks=callbacks, **settings,
    )  # fmt: skip


def broken(outputs: Any, targets: Any) -> float:
    raise KeyError("no such label")


def test_the_checkpoint_of_the_step_is_saved_though_its_metric_fails(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"Trainer.of.metrics: broken failed: KeyError: 'no such label' \(.*line \d+\)"
    ):
        trainer(tmp_path, metrics=[broken]).fit()
    (saved,) = checkpoints(tmp_path / "checkpoints")
    assert saved.name == "step-00000003"  # of the first epoch
    resumed = trainer(tmp_path, metrics=["auc"], resume=True)
    resumed.fit()
    assert set(resumed.evaluate().numbers) >= {"loss", "auc"}


class Late:
    """A metric whose `sums` fail at the held-out class `bad`."""

    names = ("late",)

    def __init__(self, bad: int):
        self.bad = bad

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        if (targets == self.bad).any():
            raise KeyError(self.bad)
        return {"sum": outputs.sum()}

    def compute(self, sums: Any) -> dict[str, float]:
        return {"late": float(sums["sum"])}


@pytest.mark.parametrize("schedule", [None, {"use": "plateau", "learning_rate": 0.1, "watch": "loss"}])
def test_the_updates_before_an_evaluation_are_saved_though_sums_fail_in_it(
    tmp_path: Path, schedule: Any
) -> None:
    """No checkpoint is due after that epoch; a schedule that waits for a score evaluates before callbacks may save."""
    callbacks = ["evaluate", {"use": "checkpoint", "every": "2 epochs"}]
    classes = [int(target) for _, target in (ROWS[i] for i in range(len(ROWS)))]
    later = (
        set(classes[6:]) - set(classes[:6])
    ).pop()  # not in the first batch, which is tried before the training
    with pytest.raises(UsageError, match=rf"Trainer.of.metrics: Late failed: KeyError: {later} "):
        trainer(tmp_path, callbacks, metrics=[Late(later)], schedule=schedule).fit()
    (saved,) = checkpoints(tmp_path / "checkpoints")
    assert saved.name == "step-00000003"


class Pair(paddle.metric.Accuracy):
    """Two numbers under one name, as PaddleNLP's AccuracyAndF1."""

    def name(self) -> Any:
        return "pair"

    def accumulate(self) -> Any:
        return 0.5, 0.25


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([{"use": "top_k", "k": [6]}], "metrics.top_k: k: 6 is more than the 5 classes"),
        ([{"use": "top_k", "k": [1]}], "metrics.top_k gives acc1, and the evaluation has it already"),
        (["auc", "auc"], "metrics.auc and metrics.auc both give auc"),
        ([5], "Trainer.of.metrics: int is no function of"),
        ([paddle.metric.Accuracy], r"Accuracy is a class: give an object, metrics=\[Accuracy\(\)\]"),
        ([Pair()], r"Pair: its name\(\) is pair, and it has 2 numbers: name each, with metric.names"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_update(
    tmp_path: Path, metrics: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        trainer(tmp_path, metrics=metrics).fit()
    assert not (tmp_path / "checkpoints").exists()


def test_best_takes_a_metric(tmp_path: Path) -> None:
    settings = {"use": "checkpoint", "best": "f1", "every": "1 epoch"}
    training = trainer(tmp_path, metrics=["classification"], callbacks=["evaluate", settings])
    training.fit()
    assert "f1" in (tmp_path / "checkpoints/best.json").read_text()
    with pytest.raises(UsageError, match=r"no number 'f1'.*metrics: \[{use: classification}\]"):
        trainer(tmp_path / "without", callbacks=["evaluate", settings]).fit()
