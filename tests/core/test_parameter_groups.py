"""Groups in every optimizer against its formula; in every layout against one process; and in a resumed run."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.core.parameter_groups import describe_groups, group, group_decay, use_group_decays
from paddle_dp.part import ParameterGroup, read_part
from tests.optimizers.test_optimizers import CASES, RATE, SHELF, gradients, layer, run, wanted
from tests.parity import LAYOUTS, assert_same, train_each, truth
from tests.ranks import run_ranks

SCALES = {"0.weight": 0.5, "0.bias": 2.0, "1.weight": 1.0, "1.bias": 1.0}
DECAYS = {"0.weight": 0.4, "0.bias": 0.1, "1.weight": 0.0, "1.bias": 0.2}
GROUPS = (
    ParameterGroup(match="0.weight", lr_scale=0.5, weight_decay=0.4),
    ParameterGroup(match="0.bias", lr_scale=2.0, weight_decay=0.1),
    ParameterGroup(match="1.bias", weight_decay=0.2),
)


class _Grouped:
    """A Config whose optimizer uses the groups' decays."""

    def __init__(self, build: Any, config: Any):
        self.build, self._config = build, config

    def prepare(self, model: nn.Layer) -> None:
        if hasattr(self._config, "prepare"):
            self._config.prepare(model)


@pytest.mark.parametrize("case", CASES)
def test_rates_and_decays_are_each_parameters_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, more, update = CASES[case]
    model, weights = layer()
    grads = gradients(weights)
    group(model, GROUPS)
    config = SHELF[name].Config(weight_decay=0.7, **more)
    build = config.build

    def built(*given: Any) -> Any:
        optimizer = build(*given)
        use_group_decays(optimizer)
        return optimizer

    found = run(_Grouped(built, config), model, grads)
    for key, value in found.items():
        monkeypatch.setattr("tests.optimizers.test_optimizers.RATE", RATE * SCALES[key])
        expected = wanted(update, {key: weights[key]}, [{key: g[key]} for g in grads], lambda n: DECAYS[n])
        np.testing.assert_allclose(value, expected[key], rtol=2e-5, atol=2e-6, err_msg=key)


def test_a_users_optimizer_takes_a_decay_as_l2() -> None:
    model = nn.Linear(2, 2)
    group(
        model,
        [ParameterGroup(match="bias", weight_decay=0.5), ParameterGroup(match="weight", weight_decay=0.0)],
    )
    before = {name: p.numpy() for name, p in model.named_parameters()}
    part = read_part("optimizers", {"use": "paddle.optimizer.SGD", "weight_decay": 0.3})
    optimizer = part.build(0.1, list(model.named_parameters()))
    use_group_decays(optimizer)
    for parameter in model.parameters():
        parameter.set_value(paddle.ones_like(parameter))
        parameter.grad = paddle.zeros_like(parameter)
    optimizer.step()
    assert before.keys() == {"weight", "bias"}
    np.testing.assert_allclose(model.bias.numpy(), 0.95)
    np.testing.assert_allclose(model.weight.numpy(), 1.0)


def test_check_tells_what_becomes_of_each_group() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    groups = (
        ParameterGroup(match="0", frozen=True),
        ParameterGroup(match="*", decay_by_depth=0.5, weight_decay=0.0),
    )
    group(model, groups)
    assert describe_groups(model, groups) == [
        "0: 2 parameters, 16 numbers, frozen",
        "*: 4 parameters, 26 numbers, 2 of them frozen, learning rate × 1, weight decay 0",
        "trained: 2 of 4, 10 of 26 numbers",
    ]
    group(model, (ParameterGroup(match="*", frozen=False), ParameterGroup(match="*", decay_by_depth=0.5)))
    assert model[0].weight.optimize_attr["learning_rate"] == 0.25


def test_groups_do_not_outlive_their_training() -> None:
    """Those of a first Trainer went on in a second one of the same model, which had none."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Linear(4, 2), nn.Linear(2, 2))
    model[3].weight.stop_gradient = True
    model[3].bias.optimize_attr["learning_rate"] = 2.0

    def state() -> list[Any]:
        rows = [
            (p.stop_gradient, p.optimize_attr["learning_rate"], group_decay(p), p.regularizer)
            for p in model.parameters()
        ]
        return [*rows, model[1]._use_global_stats]

    before = state()
    groups = (
        ParameterGroup(match="1", frozen=True),
        ParameterGroup(match="3.weight", frozen=False),
        ParameterGroup(match="*", lr_scale=0.5, weight_decay=0.1),
    )
    group(model, groups)
    use_group_decays(paddle.optimizer.Momentum(0.1, parameters=model.parameters()))
    first = state()
    assert first != before and first[-1] is True
    group(model, groups)
    assert [row[:3] for row in state()[:-1]] == [row[:3] for row in first[:-1]] and state()[-1] is True
    group(model, ())
    assert state() == before


def test_a_finished_optimizer_keeps_its_rates_and_the_parameters_it_has_not() -> None:
    """The user has made it of the model as the first training's groups left it."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    groups = (ParameterGroup(match="0", frozen=True), ParameterGroup(match="1", lr_scale=0.1))
    group(model, groups)
    rated = [{"params": model[1].parameters(), "learning_rate": 0.1}, {"params": model[2].parameters()}]
    group(model, (), (), paddle.optimizer.AdamW(0.1, parameters=rated))
    assert [layer.weight.optimize_attr["learning_rate"] for layer in model] == [1.0, 0.1, 1.0]
    assert [p.stop_gradient for p in model.parameters()] == [True, True, False, False, False, False]
    for each in model:
        each.weight.optimize_attr["learning_rate"] = 1.0
    group(model, groups)
    group(model, (), (), paddle.optimizer.AdamW(0.1, parameters=model.parameters()))
    assert [layer.weight.optimize_attr["learning_rate"] for layer in model] == [1.0, 1.0, 1.0]
    assert not any(p.stop_gradient for p in model.parameters()[2:])
    norm = nn.BatchNorm1D(2)
    group(norm_model := nn.Sequential(norm, model[2]), (ParameterGroup(match="0", frozen=True),))
    group(norm_model, (), (), paddle.optimizer.AdamW(0.1, parameters=model[2].parameters()))
    assert norm.weight.stop_gradient and norm._use_global_stats is True  # also its statistics
    group(norm_model, ())
    assert not norm.weight.stop_gradient and norm._use_global_stats is None
    model[2].weight.optimize_attr["learning_rate"] = 0.3  # by hand, after the groups
    group(model, ())
    assert model[2].weight.optimize_attr["learning_rate"] == 0.3


def test_an_adapters_base_stays_frozen() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Linear(4, 2))
    group(model, (), {"0.weight", "0.bias", "1.weight", "1.bias"})
    group(model, ())
    assert [p.stop_gradient for p in (model[0].weight, model[1].bias, model[2].bias)] == [True, True, False]
    assert model[1]._use_global_stats is True


OPTIMIZER = (
    "{{use: {use}, clip: 0.5, weight_decay: 0.1, groups: [{{match: 'blocks.1.*', frozen: true}}, "
    "{{match: '*.bias', weight_decay: 0.05}}, {{match: 'blocks.3.*', lr_scale: 3.0}}, "
    "{{match: '*', decay_by_depth: 0.8}}]}}"
)


def _layouts(use: str, names: list[str], folder: Any) -> None:
    optimizer = OPTIMIZER.format(use=use)
    strategies = [LAYOUTS[name] for name in names]
    ranks = run_ranks(train_each, 2, str(folder), strategies, optimizer=optimizer, timeout=300)
    for found in zip(*ranks, strict=True):
        assert_same(found, truth(optimizer=optimizer))


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("use", ["adamw", "momentum", "sgd", "lamb"])
def test_every_layout_trains_the_groups_of_one_process(use: str, tmp_path: Any) -> None:
    _layouts(use, [name for name in LAYOUTS if use != "lamb" or name != "tensor"], tmp_path)
