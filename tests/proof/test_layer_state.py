"""What a proof watches of layers outside of their weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
from paddle import nn

from paddle_dp.core.batch_norm import RunningStatistics
from paddle_dp.core.placed_model import PlacedModel
from paddle_dp.mesh import join
from paddle_dp.proof.layer_state import LayerStateChanges


class Counting(nn.Layer):
    calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x


def watched(model: nn.Layer) -> dict[int, dict[str, Any]]:
    mesh = join(seed=0)
    learner: Any = SimpleNamespace(
        placed=PlacedModel(model=model, mesh=mesh),
        statistics=RunningStatistics(model, mesh),
        loss=SimpleNamespace(owner=None),
    )
    changes = LayerStateChanges(learner)
    model(paddle.ones([2, 3, 4]))
    changes.record(1)
    return changes.by_step


def test_what_paddle_writes_into_its_own_norm_is_no_memory_of_the_models() -> None:
    """`nn.BatchNorm1D` sets its data format in each forward; ours, which the ranks run in its place, does not."""
    assert watched(nn.Sequential(nn.BatchNorm1D(3))) == {}


def test_an_attribute_that_a_forward_changes_is_named() -> None:
    assert list(watched(nn.Sequential(Counting()))[1]) == ["`calls` of 0"]
