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
from tests.ranks import run_ranks


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


def hits(outputs: Any, targets: Any) -> Any:
    return outputs.argmax(-1) == targets


def misnamed(outputs: Any, targets: Any) -> Any:
    return {"f2": 1.0}


misnamed.names = ("f1",)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([hits], r"Trainer.of.metrics: hits: hits must be a number, not array\("),
        ([misnamed], "Trainer.of.metrics: misnamed must return a number for each of f1, not {'f2': 1.0}"),
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


def refused(folder: str) -> str:
    with pytest.raises(UsageError) as caught:
        trainer(Path(folder), metrics=[hits]).fit()
    return str(caught.value)


def test_a_function_that_returns_no_number_is_refused_on_every_rank(tmp_path: Path) -> None:
    """Though only one tries it."""
    one, other = run_ranks(refused, 2, str(tmp_path))
    assert one == other and "hits must be a number" in one
    assert not (tmp_path / "checkpoints").exists()


class Remembering:
    """A metric of all samples alone: fewer are none of its cases; it notes the samples of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, outputs: Any, targets: Any) -> float:
        self.calls.append(len(outputs))
        return float({len(ROWS): 0.5}[len(outputs)])


def test_a_function_that_fails_with_few_samples_is_not_refused_and_a_trial_is_not_remembered(
    tmp_path: Path,
) -> None:
    training = trainer(tmp_path, metrics=[metric := Remembering()])
    training.fit()
    assert metric.calls == [len(ROWS)] * 2


def test_best_takes_a_metric(tmp_path: Path) -> None:
    settings = {"use": "checkpoint", "best": "f1", "every": "1 epoch"}
    training = trainer(tmp_path, metrics=["classification"], callbacks=["evaluate", settings])
    training.fit()
    assert "f1" in (tmp_path / "checkpoints/best.json").read_text()
    with pytest.raises(UsageError, match=r"no number 'f1'.*metrics: \[{use: classification}\]"):
        trainer(tmp_path / "without", callbacks=["evaluate", settings]).fit()
