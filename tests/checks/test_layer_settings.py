"""Which state of a user's code is a setting, which ranks compare."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle import nn

from paddle_dp.checks.layer_settings import LayerSettings
from paddle_dp.core.loss import as_loss
from paddle_dp.core.turns import Turn, TurnsLoss
from paddle_dp.errors import DivergenceError
from paddle_dp.text import CAN_DIFFER
from paddle_dp.units import EverySteps


class Hook:
    """Counts its calls and, as a recorder, keeps outputs, which are each rank's."""

    def __init__(self, counts: bool):
        self.counts, self.calls, self.last, self.seen = counts, 0, paddle.zeros([3]), {"outputs": [0.0]}

    def __call__(self, layer: Any, x: Any, y: paddle.Tensor) -> None:
        self.calls += self.counts
        self.last, self.seen = y, {"outputs": y.tolist()}


def hooked(counts: bool) -> nn.Layer:
    layer = nn.Linear(4, 3)
    layer.register_forward_post_hook(Hook(counts))
    return layer


def in_attribute(outputs: Any, targets: Any) -> Any:
    in_attribute.calls += 1  # type: ignore[attr-defined]
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


in_attribute.calls = 0  # type: ignore[attr-defined]


def plain(outputs: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def in_turns() -> TurnsLoss:
    losses = {"critic": plain, "actor": in_attribute}
    every = EverySteps(1, "steps")
    return TurnsLoss(
        [
            Turn(name=n, number=i, match=["*"], loss=as_loss(losses[n]), every=every)
            for i, n in enumerate(losses)
        ]
    )


def settings_of(model: nn.Layer, loss: Any, gather: Any = lambda row: [row]) -> LayerSettings:
    named = model.named_sublayers(include_self=True)
    placed = SimpleNamespace(named_layers=lambda kept=[*named]: kept)
    mesh = SimpleNamespace(reads=True, ranks=2, gather=gather)
    optimizer = SimpleNamespace(get_lr=lambda: 0.1)
    learner: Any = SimpleNamespace(placed=placed, loss=loss, mesh=mesh, async_rank=None, optimizer=optimizer)
    return LayerSettings(learner)


@pytest.mark.parametrize(
    ("model", "loss", "keys"),
    [
        (hooked(True), plain, [("model", "hook behind 0.calls")]),
        (hooked(False), plain, []),  # a recorder's tensors and lists are its own
        (nn.Linear(4, 3), in_attribute, [("loss", "calls")]),
        (nn.Linear(4, 3), in_turns(), [("turns.actor.loss", "calls")]),
    ],
)
def test_the_state_of_a_users_code_is_compared(
    model: nn.Layer, loss: Any, keys: list[tuple[str, str]]
) -> None:
    loss = as_loss(loss)
    settings = settings_of(model, loss)
    before = settings._settings()
    loss(model(paddle.ones([2, 4])), paddle.zeros([2], "int64"))
    after = settings._settings()
    assert [name for name in after if after[name] != before[name]] == keys


@pytest.mark.parametrize(
    ("loss", "told"),
    [(partial(plain), True), (partial(nn.functional.cross_entropy, reduction="none"), False)],
)
def test_a_scripts_loss_is_told_and_a_librarys_is_refused(loss: Any, told: bool) -> None:
    def gather(row: Any) -> list[Any]:
        """The other rank has another scale."""
        is_values = row and len(row[0]) == 3
        return [row, [[*key, "2.0"] for *key, _ in row] if is_values else row]

    settings = settings_of(nn.Linear(4, 3), as_loss(loss), gather)
    loss.keywords["scale"] = 1.0
    if told:
        (sentence,) = settings.check("after step 6")
        assert "loss.scale is another one on each rank: its code, or a callback, changes it" in sentence
        assert sentence.endswith(CAN_DIFFER)
    else:
        with pytest.raises(
            DivergenceError, match=r"after step 6: ranks differ in scale of loss: 1\.0 on rank 0"
        ):
            settings.check("after step 6")
