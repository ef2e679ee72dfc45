"""A metric that fails ends the training after its checkpoint, not before; one that does not fit, before it begins."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp import Trainer
from paddle_dp.batch import MicroBatch
from paddle_dp.checkpoint import checkpoints
from paddle_dp.errors import UsageError
from paddle_dp.train import evaluate
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


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([{"use": "top_k", "k": [6]}], "metrics.top_k: k: 6 is more than the 5 classes"),
        ([{"use": "top_k", "k": [1]}], "metrics.top_k gives acc1, and the evaluation has it already"),
        (["auc", "auc"], "metrics.auc and metrics.auc both give auc"),
        ([5], "Trainer.of.metrics: int is no function of"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_update(
    tmp_path: Path, metrics: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        trainer(tmp_path, metrics=metrics).fit()
    assert not (tmp_path / "checkpoints").exists()


class StepsFirst(paddle.nn.Layer):
    """Outputs [T, n, c], as for a CTC loss, with T = 6."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = paddle.nn.Linear(5, 6 * 3)

    def forward(self, x: Any) -> Any:
        return self.linear(x).reshape([-1, 6, 3]).transpose([1, 0, 2])


def mean_of_each(outputs: Any, targets: Any) -> Any:
    return (outputs.mean([0, 2]) - targets) ** 2


def test_as_many_steps_as_samples_are_not_taken_for_them(tmp_path: Path) -> None:
    """Micro-batches were joined along the steps, silently."""
    data = [(np.ones(5, "float32"), np.float32(n)) for n in range(12)]
    for batch, rows in ((4, 4), (6, 5)):
        training = Trainer.of(
            model=StepsFirst(), train=data, test=data, batch=batch, loss=mean_of_each, optimizer="sgd",
            folder=tmp_path, length="1 epoch", callbacks=["evaluate"], metrics=[broken],
        )  # fmt: skip
        with pytest.raises(
            UsageError, match=rf"broken needs a row for each of {rows} samples; .* \[6, {rows}, 3\]"
        ):
            training.fit()


class Squeezed(paddle.nn.Layer):
    """Outputs [n, *dims], without dims of 1; `taken`: the numbers of samples that it takes, or all."""

    def __init__(self, *dims: int, taken: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.dims, self.taken = dims, taken
        self.linear = paddle.nn.Linear(5, math.prod(dims))

    def forward(self, x: Any) -> Any:
        assert not self.taken or len(x) in self.taken
        return self.linear(x).reshape([-1, *self.dims]).squeeze()


def square_of_each(outputs: Any, targets: Any) -> Any:
    return outputs.square().flatten(1).mean(1)


def rows_of(outputs: Any, targets: Any) -> float:
    return float(len(outputs))


@pytest.mark.parametrize(
    ("model", "batch", "doubts"),
    [
        (Squeezed(2), 2, 0),  # as many classes as samples
        (Squeezed(5), 5, 0),
        (Squeezed(2, 3), 2, 0),  # one sample would lose its dim
        (Squeezed(3, 2), 3, 1),
        (Squeezed(3, 2, taken=(3,)), 3, 1),  # fewer samples tell nothing
    ],
)
def test_samples_of_ordinary_outputs_are_not_taken_for_steps(
    model: Any, batch: int, doubts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tallied, fewer = evaluate._tallied, []
    monkeypatch.setattr(
        evaluate, "_tallied", lambda *args, **more: fewer.append(bool(more)) or tallied(*args, **more)
    )
    data = [(np.ones(5, "float32"), np.float32(n)) for n in range(30)]
    training = Trainer.of(
        model=model, train=data, test=data, batch=batch, loss=square_of_each, optimizer="sgd", folder=tmp_path,
        length="1 epoch", callbacks=["evaluate"], metrics=[rows_of],
    )  # fmt: skip
    training.fit()
    assert training.evaluate().numbers["rows_of"] == 30 and sum(fewer) == doubts


def test_uneven_micro_batches_are_not_left_with_one_sample() -> None:
    cut = evaluate._without_last
    batches = [MicroBatch(paddle.ones([n, 5]), paddle.ones([n]), n) for n in (1, 2, 3)]
    assert [cut(each).rows for each in batches] == [1, 2, 2]


def test_best_takes_a_metric(tmp_path: Path) -> None:
    settings = {"use": "checkpoint", "best": "f1", "every": "1 epoch"}
    training = trainer(tmp_path, metrics=["classification"], callbacks=["evaluate", settings])
    training.fit()
    assert "f1" in (tmp_path / "checkpoints/best.json").read_text()
    with pytest.raises(UsageError, match=r"no number 'f1'.*metrics: \[{use: classification}\]"):
        trainer(tmp_path / "without", callbacks=["evaluate", settings]).fit()
