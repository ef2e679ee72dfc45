"""What a training does about callbacks and data sets that would change it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp import Callback, Trainer
from paddle_dp.data.sampler import Sampler
from paddle_dp.errors import DivergenceError
from paddle_dp.train.training_state import TrainingState
from tests.house.datasets import Points


class Probe(Callback):
    """Runs a backward of its own after each update, and leaves the gradients."""

    def __init__(self, model: nn.Layer):
        self.model = model

    def step(self, moment: Any) -> None:
        self.model(paddle.ones([2, 6])).square().sum().backward()


def weights(folder: Path, probed: bool) -> list[Any]:
    paddle.seed(0)
    model = nn.Linear(6, 4)
    Trainer.of(
        model=model, loss=nn.CrossEntropyLoss(reduction="none"), train=Points(24), batch=8, optimizer="sgd",
        callbacks=[Probe(model)] if probed else [], folder=folder,
    ).fit("4 steps")  # fmt: skip
    return cast("list[Any]", model.weight.tolist())


def test_an_update_has_no_gradient_of_a_callback(tmp_path: Path) -> None:
    """On N ranks it would be added N times."""
    assert weights(tmp_path / "probed", True) == weights(tmp_path / "plain", False)


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
