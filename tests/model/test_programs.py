"""A user's programs (paddle.jit.to_static) learn what their layers learn; a layout that exchanges in one is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.core.programs import layers_in_programs
from paddle_dp.errors import UsageError
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.model.compiled import check_programs
from paddle_dp.plan.layout import Layout
from tests.house.datasets import Points
from tests.ranks import run_ranks


class Block(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.tanh(self.linear(x))


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Block(), Block(), nn.Linear(6, 4)

    def body(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.second(self.first(x))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.body(x))


class Decorated(Model):
    body = paddle.jit.to_static(Model.body)


def built(program: str) -> nn.Layer:
    paddle.seed(0)
    model = Decorated() if program == "method" else Model()
    if program == "sublayer":
        model.first = paddle.jit.to_static(model.first)
    elif program in ("model", "whole graph"):
        model = paddle.jit.to_static(model, full_graph=program == "whole graph")
    return model


def weights(folder: str) -> dict[str, list[Any]]:
    """The weights after a training of each program; "" is none."""
    learned = {}
    for program in ("", "model", "method", "sublayer", "whole graph"):
        model = built(program)
        optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
        Trainer.of(
            model=model, loss="cross_entropy", optimizer=optimizer, train=Points(24), batch=6, length="6 steps",
            folder=f"{folder}/{program or 'layers'}", callbacks=[],
        ).fit()  # fmt: skip
        learned[program] = [parameter.numpy() for parameter in model.parameters()]
    return learned


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_of_a_user_learns_what_its_layers_learn(ranks: int, tmp_path: Path) -> None:
    """Paddle traced the hooks of the watch for random numbers, and ended in "Not supported numpy dtype uint32"."""
    learned = run_ranks(weights, ranks, str(tmp_path))[0]
    layers = learned.pop("")
    for program, values in learned.items():
        for a, b in zip(layers, values, strict=True):
            np.testing.assert_array_equal(a, b, program)


def test_layers_in_programs_are_those_below_a_program() -> None:
    assert layers_in_programs(built("")) == []
    model = built("sublayer")
    assert layers_in_programs(model) == [model.first.linear]
    assert layers_in_programs(built("method")) == []


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [
        (Layout(degrees=Degrees(data=2)), "sync_batch_norm=false"),
        (Layout(degrees=Degrees(sharding=2)), "sync_batch_norm=false"),
        (Layout(degrees=Degrees(tensor=2)), "ranks of the tensor axis"),
        (Layout(degrees=Degrees(sequence=2)), "ranks of the sequence axis"),
        (Layout(degrees=Degrees(sharding=2), sharding_stage=3), "sharding_stage=2"),
    ],
)
def test_a_layout_that_exchanges_within_a_program_is_refused(layout: Layout, remedy: str) -> None:
    model = nn.Sequential(Model(), nn.BatchNorm1D(4))
    check_programs(model, layout, True)
    with pytest.raises(UsageError, match=f"is a program, and .*{remedy}"):
        check_programs(paddle.jit.to_static(model), layout, True)


def test_a_batch_norm_that_keeps_its_statistics_or_is_on_one_reader_is_not() -> None:
    model = paddle.jit.to_static(nn.Sequential(Model(), nn.BatchNorm1D(4)))
    check_programs(model, Layout(degrees=Degrees(pipeline=2)), True)
    model[1].eval()
    check_programs(model, Layout(degrees=Degrees(data=2)), True)


@pytest.mark.parametrize("axis", ["data", "pipeline", "sharding"])
def test_a_layout_that_exchanges_around_a_program_is_not(axis: str) -> None:
    check_programs(built("model"), Layout(degrees=Degrees(**{axis: 2})), True)
