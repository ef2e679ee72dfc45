"""Which state of a user's code is a setting, which ranks compare."""

from typing import Any

import paddle
import pytest
from paddle import nn

from paddle_dp.checks.layer_settings import LayerSettings
from paddle_dp.learner import full_model_learner
from paddle_dp.mesh import Mesh
from tests.house.learners import task_of

KEPT = {"mean": 0.0}


class InGlobal(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        KEPT["mean"] += 1.0
        return super().forward(x)


def in_hook() -> nn.Layer:
    layer, kept = nn.Linear(4, 3), {"mean": 0.0}
    layer.register_forward_post_hook(lambda layer, x, y: kept.update(mean=kept["mean"] + 1.0))
    return layer


def in_attribute(outputs: Any, targets: Any) -> Any:
    in_attribute.calls += 1  # type: ignore[attr-defined]
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


in_attribute.calls = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "loss", "key"),
    [
        (lambda: InGlobal(4, 3), None, ("", "global KEPT.mean")),
        (in_hook, None, ("", "hook behind 0.kept.mean")),
        (lambda: nn.Linear(4, 3), in_attribute, ("the loss", "calls")),
    ],
)
def test_the_state_of_a_users_code_is_compared(make: Any, loss: Any, key: tuple[str, str]) -> None:
    task = task_of(make(), loss or nn.CrossEntropyLoss(reduction="none"))
    settings = LayerSettings(full_model_learner(task, Mesh.alone()))
    before = settings._settings()
    task.loss(task.model(paddle.ones([2, 4])), paddle.zeros([2], "int64"))
    after = settings._settings()
    assert [name for name in after if after[name] != before[name]] == [key]
