"""What a training does about callbacks and data sets that would change it."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp import Callback, Trainer
from paddle_dp.data.sampler import Sampler
from paddle_dp.errors import DivergenceError, UsageError
from paddle_dp.learner.update import WeightSync
from paddle_dp.train.rounds import RoundDriver
from paddle_dp.train.steps import StepDriver
from paddle_dp.train.training_state import TrainingState
from tests.house.datasets import Points


class Probe(Callback):
    """Runs a backward of its own after each update, and leaves the gradients."""

    def __init__(self, model: nn.Layer):
        self.model = model

    def step(self, moment: Any) -> None:
        self.model(paddle.ones([2, 6])).square().sum().backward()


class EvaluationProbe(Callback):
    """Runs it after the evaluations of a schedule."""

    def __init__(self, model: nn.Layer):
        self.model = model

    def evaluated(self, moment: Any, evaluation: Any) -> None:
        Probe.step(cast("Any", self), moment)


def weights(folder: Path, probe: Any = None, **more: Any) -> list[Any]:
    paddle.seed(0)
    model = nn.Linear(6, 4)
    Trainer.of(
        model=model, loss=nn.CrossEntropyLoss(reduction="none"), train=Points(24), batch=8, optimizer="sgd",
        callbacks=[probe(model)] if probe else [], folder=folder, **more,
    ).fit("4 steps")  # fmt: skip
    return cast("list[Any]", model.weight.tolist())


def test_an_update_has_no_gradient_of_a_callback(tmp_path: Path) -> None:
    """On N ranks it would be added N times."""
    more: dict[str, Any] = {
        "test": Points(24),
        "schedule": {"use": "plateau", "learning_rate": 0.1, "every": "1 step"},
    }
    for name, probe, words in (("step", Probe, {}), ("evaluation", EvaluationProbe, more)):
        assert weights(tmp_path / name, probe, **words) == weights(tmp_path / f"plain {name}", **words)


@pytest.mark.parametrize("driver", [StepDriver, RoundDriver])
def test_each_driver_compares_the_orders_of_an_epoch(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_order() -> None:
        raise DivergenceError("epoch 0")

    monkeypatch.setattr("paddle_dp.train.rounds.work_queue_of", lambda mesh: None)
    training = SimpleNamespace(
        learner=SimpleNamespace(training=nullcontext), mesh=None, continues=True, check_order=check_order
    )
    with pytest.raises(DivergenceError, match="epoch 0"):
        driver.run(SimpleNamespace(_training=training))


class Stated(Points):
    """With an order that depends on something else than (seed, epoch) from the second epoch on."""

    shift = 0

    def epoch_order(self, seed: int, epoch: int) -> Any:
        return np.roll(np.arange(len(self)), epoch * self.shift)


@pytest.mark.parametrize(("shift", "epoch"), [(0, 1), (3, 0), (3, 1)])
def test_ranks_that_read_an_epoch_in_two_orders_end(shift: int, epoch: int) -> None:
    sums: list[str] = []
    for rank in range(2):
        data = Stated(24)
        data.shift = shift * rank
        kept: list[str] = []
        mesh = SimpleNamespace(ranks=2, gather=lambda value, kept=kept: kept.append(value) or [*sums, value])
        training: Any = SimpleNamespace(
            loader=SimpleNamespace(sampler=Sampler.for_dataset(data, 8)), mesh=mesh,
            progress=SimpleNamespace(epoch=epoch),
        )  # fmt: skip
        if rank and shift and epoch:
            with pytest.raises(DivergenceError, match="epoch 1: the data set's epoch_order is CRC-32"):
                TrainingState.check_order(training)
        else:
            TrainingState.check_order(training)
            sums.extend(kept)


@pytest.mark.parametrize("moment", ["step", "start"])
def test_weights_that_a_callback_cannot_read_are_said_to_be_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Under stage 3 of sharding; Paddle's error says "Tensor holds no memory"."""

    def read(self: Callback, moment: Any) -> None:
        raise RuntimeError("Tensor holds no memory")

    reader = type("Reader", (Callback,), {moment: read})()
    monkeypatch.setattr(WeightSync, "explain", lambda self, error: UsageError(f"explained: {error}"))
    with pytest.raises(UsageError, match="explained: Tensor holds no memory"):
        weights(tmp_path, lambda model: reader)
