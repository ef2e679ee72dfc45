"""What forward remembers and no checkpoint holds is told before the first save, for a resumed run begins without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.train import Trainer
from tests.ranks import run_ranks

SAVES = [{"use": "checkpoint", "every": "1 step"}]


class Points:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Any:
        return np.full(4, i, "float32"), i % 3


class Moving(nn.Layer):
    """Keeps a mean of what it has seen: as an attribute, as a buffer, or, changing nothing, as a table."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 3)
        if how == "attribute":
            self.seen = paddle.zeros([4])
        else:
            self.register_buffer("seen", paddle.zeros([4]), persistable=how == "buffer")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.training and self.how != "table":
            self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        self.last = x.mean()  # made in forward: nobody takes it for a state
        return self.linear(x - self.seen)


@pytest.mark.parametrize(("how", "told"), [("attribute", 1), ("lost", 1), ("buffer", 0), ("table", 0)])
def test_a_buffer_that_training_changes_and_no_checkpoint_holds_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, told: int
) -> None:
    model = Moving(how)
    trainer = Trainer.of(
        model=model,
        loss="cross_entropy",
        optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()),
        train=Points(),
        batch=4,
        folder=tmp_path / "run",
        callbacks=SAVES,
    )
    trainer.fit("3 steps")
    said = capsys.readouterr().err
    assert said.count("buffer seen: changed in training, and not in the checkpoint") == told
    assert said.count("buffer") == 2 * told  # register_buffer, and no other one


class Remembers(paddle.optimizer.SGD):
    """Counts its updates, and holds a momentum, in Python; its parameters and its list of factors are nothing new."""

    def __init__(self, rate: float, parameters: Any):
        super().__init__(rate, parameters=parameters)
        self.parameters, self.factors, self.momentum = list(parameters), [0.5, 0.9], {}
        self.updates = 0

    def step(self) -> None:
        self.updates += 1
        self.momentum = {p.name: p.grad * self.factors[0] for p in self.parameters}
        super().step()


@pytest.mark.parametrize("own", [True, False])
def test_what_an_own_optimizer_remembers_in_python_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    model = nn.Linear(4, 3)
    kind = Remembers if own else paddle.optimizer.AdamW
    trainer = Trainer.of(
        model=model,
        loss="cross_entropy",
        optimizer=kind(0.1, parameters=model.parameters()),
        train=Points(),
        batch=4,
        folder=tmp_path / "run",
        callbacks=SAVES,
    )
    trainer.fit("3 steps")
    said = capsys.readouterr().err
    assert said.count("optimizer Remembers: its attributes momentum, updates changed in training") == own
    assert ("optimizer" in said) == own


def running_mean(folder: str) -> Any:
    """What this rank's model holds after a training that was never saved and never evaluated."""
    paddle.seed(0)
    model = nn.Sequential(nn.BatchNorm1D(4), nn.Linear(4, 3))
    trainer = Trainer.of(
        model=model,
        loss="cross_entropy",
        optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()),
        train=Points(),
        batch=4,
        folder=folder,
        callbacks=[],
    )
    trainer.fit("3 steps")
    return model[0]._mean.numpy()


def test_ranks_have_the_same_running_statistics_after_a_training_that_was_never_saved(tmp_path: Path) -> None:
    first, second = run_ranks(running_mean, 2, str(tmp_path / "run"))
    assert first == second
