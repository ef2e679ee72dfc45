"""Averages of the weights: by their formula, the same in every layout, saved in one and resumed in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp import checkpoint as checkpoints
from paddle_dp.assembly.build import build
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.checkpoint.tensor_file import read_header, read_rows
from paddle_dp.errors import CheckpointError, RecipeError
from paddle_dp.learner import Task
from paddle_dp.learner.ema import Averages
from paddle_dp.mesh import join
from paddle_dp.part import read_part
from paddle_dp.recipe import Ema, read_recipe
from paddle_dp.train.state import load_model
from paddle_dp.units import Every
from tests.house.recipes import small_recipe
from tests.parity import LAYOUTS, assert_same, train, train_each, truth, weights
from tests.ranks import run_ranks

EMA = ("ema={decay: 0.8, every: 2 steps}", "strategy.check_every=null")


@pytest.mark.parametrize(("warmup", "decays"), [(False, [0.9, 0.9]), (True, [2 / 11, 3 / 12])])
def test_averages_are_the_formula(warmup: bool, decays: list[float]) -> None:
    model = nn.Linear(2, 1)
    model.bias.stop_gradient = True
    optimizer = paddle.optimizer.SGD(1.0, parameters=[model.weight])
    task = Task(model=model, loss=nn.functional.mse_loss, optimizer=optimizer)
    learner = read_part("strategies", {"use": "single"}).build(join()).place(task)
    averages = Averages(learner, Ema(decay=0.9, every=Every.parse("3 steps"), warmup=warmup))
    wanted = model.weight.numpy().astype("float64")
    for step in range(1, 8):
        model.weight.set_value(model.weight * 0.5 + step)
        averages.update(step)
        if step % 3 == 0:
            decay = decays[step // 3 - 1]
            wanted = decay * wanted + (1 - decay) * model.weight.numpy()
    ((name, _, average),) = averages.named()
    assert name == "weight"
    np.testing.assert_allclose(average.numpy(), wanted, rtol=1e-6)
    now = model.weight.numpy()
    with averages.in_place():
        np.testing.assert_array_equal(model.weight.numpy(), average.numpy())
    np.testing.assert_array_equal(model.weight.numpy(), now)
    with pytest.raises(ZeroDivisionError), averages.in_place():
        raise ZeroDivisionError
    np.testing.assert_array_equal(model.weight.numpy(), now)


RECIPE = small_recipe(
    "length: 4 steps, batch: 50", model="mlp, inputs: 64, hidden: [8], classes: 10", callbacks="[]",
    optimizer="adamw, groups: [{match: head, frozen: true}]", ema="{decay: 0.5}",
)  # fmt: skip


def test_averages_are_evaluated_saved_merged_and_resumed(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    recipe = read_recipe(tmp_path / "recipe.yaml", [f"output_dir={tmp_path}"])
    trainer = build(recipe, join())
    trainer.fit("2 steps")
    numbers = trainer.evaluate().numbers
    assert {"loss", "acc1", "ema_loss", "ema_acc1"} <= set(numbers) and numbers["loss"] != numbers["ema_loss"]
    assert {"ema_loss", "ema_acc1"} <= trainer.evaluation_names()
    path = checkpoints.save(trainer.snapshot(), tmp_path / "checkpoints", trainer.mesh)
    saved = checkpoints.load(path)
    assert {name for name in saved.names if name.startswith("ema/")} == {
        "ema/body.0.weight",
        "ema/body.0.bias",
    }
    assert set(saved.digests()) == {"model", "optimizer", "ema"}

    assert checkpoints.merge(path, tmp_path / "all.safetensors", ema=True) == 4
    merged = read_header(tmp_path / "all.safetensors")
    for name, kept in (("body.0.weight", "ema"), ("head.weight", "model")):
        found = read_rows(tmp_path / "all.safetensors", merged[name])
        np.testing.assert_array_equal(found, saved.read(f"{kept}/{name}"))

    load_model(saved, trainer.learner, ema=True)
    assert trainer.evaluate().numbers["loss"] == pytest.approx(numbers["ema_loss"], rel=1e-6)

    straight = build(read_recipe(tmp_path / "recipe.yaml", [f"output_dir={tmp_path / 'b'}"]), join())
    straight.fit("4 steps")
    again = build(recipe, join(), "newest")
    again.fit("4 steps")
    for (name, _, one), (_, _, other) in zip(straight.averages.named(), again.averages.named(), strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=name)


def test_without_averages_there_are_none_to_merge(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("ema: {decay: 0.5}\n", ""))
    trainer = build(read_recipe(tmp_path / "recipe.yaml", [f"output_dir={tmp_path}"]), join())
    path = checkpoints.save(trainer.snapshot(), tmp_path / "checkpoints", trainer.mesh)
    with pytest.raises(CheckpointError, match="holds no averages of weights: it was trained without `ema:`"):
        checkpoints.merge(path, tmp_path / "all.safetensors", ema=True)


def test_a_script_has_averages_too(tmp_path: Path) -> None:
    data = [(np.full([6], i / 8, "float32"), np.int64(i % 3)) for i in range(8)]
    how: dict[str, Any] = {
        "optimizer": "adamw", "loss": "cross_entropy", "train": data, "batch": 4, "callbacks": [],
    }  # fmt: skip
    trainer = Trainer.of(model=nn.Linear(6, 3), length="1 steps", folder=tmp_path, ema={"decay": 0.5}, **how)
    before = trainer.learner.model.weight.numpy()
    trainer.fit()
    assert trainer.averages is not None
    average = {name: average.numpy() for name, _, average in trainer.averages.named()}["weight"]
    now = trainer.learner.model.weight.numpy()
    np.testing.assert_allclose(average, (before + now) / 2, rtol=1e-5)
    assert not np.array_equal(before, now)


def test_every_is_in_steps(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(RecipeError, match=r"ema\.every: .* like .50 steps. \(units: step, steps\)"):
        read_recipe(tmp_path / "recipe.yaml", ["ema.every=1 epoch"])


@pytest.mark.long
@pytest.mark.processes
def test_every_layout_has_the_averages_of_one_process(tmp_path: Path) -> None:
    one = truth(more=EMA)
    assert one["held_out"]["ema_loss"] != one["held_out"]["loss"]
    ranks = run_ranks(train_each, 2, str(tmp_path), list(LAYOUTS.values()), more=EMA, timeout=300)
    for found in zip(*ranks, strict=True):
        assert_same(found, one)
        assert any(name.startswith("ema/") for name in weights(found[0]["saved"]))


@pytest.mark.long
@pytest.mark.processes
def test_averages_are_resumed_in_another_layout(tmp_path: Path) -> None:
    how: dict[str, Any] = {"more": EMA, "timeout": 300}
    run_ranks(train, 2, str(tmp_path), LAYOUTS["sharding 3"], "4 steps", **how)
    run_ranks(train, 3, str(tmp_path), "{use: hybrid, sharding: 3}", "7 steps", True, **how)
    many = run_ranks(train, 2, str(tmp_path), LAYOUTS["tensor"], "10 steps", True, **how)
    one = truth(more=EMA)
    assert_same(many, one | {"rows": one["rows"][7:]})
