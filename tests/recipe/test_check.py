"""Recipes checked on the screen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.recipe import Recipe
from paddle_dp.recipe.check import check_all


def test_a_line_for_each_and_all_mistakes(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = write(), write("train: {batch: x}", "wrong.yaml")
    assert check_all([wrong, right]) == 2
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"{right}: recipe_model.Config on digits, sgd, data_parallel: 3 epochs in batches of 32",
        f"  imported: {right.parent / 'recipe_model.py'}",
    ]
    assert f"{wrong}:1: train.batch: 'x' is not a whole number" in err and "needs 'model'" in err


def test_right_ones_leave_with_0(write: Callable[..., Path]) -> None:
    assert check_all([write()]) == 0


def test_a_missing_loss_is_found_without_building_the_model(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = write()
    for name, more in (("without", ""), ("with_loss", "    def loss(self, outputs, targets): ...")):
        (file.parent / f"{name}.py").write_text((file.parent / "recipe_model.py").read_text() + LAYER + more)
    assert check_all([file], ["loss=null", "model.use=without.Config"]) == 2
    assert "model without.Config has no method loss(outputs, targets)" in capsys.readouterr().err
    assert check_all([file], ["loss=null", "model.use=with_loss.Config"]) == 0


LAYER = """
class Layer:
    __module__ = "paddle.nn"  # as Paddle's, which takes a second to import

class Model(Layer):
    depth = 3
"""


def test_settings_and_a_forecast_are_of_every_recipe(
    write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    def forecast(recipe: Recipe, _: Path) -> list[str]:
        if recipe.train.batch == 8:
            raise UsageError("8 does not fit")
        return [f"batch {recipe.train.batch}", "and more"]

    file = write()
    assert check_all([file], ["train.batch=16"], forecast) == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["  batch 16", "  and more"]
    assert check_all([file], ["train.batch=8"], forecast) == 2
    assert capsys.readouterr().err == "8 does not fit\n"
