"""The recipe as a type: frozen, closed, and made in Python as well as from YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from paddle_dp.part import read_part
from paddle_dp.recipe import LoaderSettings, Precision, Recipe, Train
from paddle_dp.units import Length


def nothing() -> None:
    """A model's function, which nobody calls here."""


def made(**more: Any) -> Recipe:
    parts: dict[str, Any] = {
        "model": read_part("models", {"use": "tests.recipe.test_schema.nothing"}),
        "dataset": read_part("datasets", {"use": "digits"}),
        "optimizer": {"use": "sgd"},  # a mapping will do as well
        "schedule": {"use": "constant", "learning_rate": 0.1},
        "strategy": {"use": "single"},
        "callbacks": (),
        "train": Train(length=Length(1, "epochs"), batch=8),
    }
    return Recipe(**{**parts, **more})


def test_a_recipe_can_be_made_in_python() -> None:
    recipe = made(name="mine")
    assert recipe.optimizer.name == "sgd" and recipe.loader == LoaderSettings()
    assert recipe.folder == Path("runs/mine")


def test_a_recipe_is_frozen_and_closed() -> None:
    with pytest.raises(ValidationError):
        made().name = "other"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="colour"):
        made(colour="red")


def test_the_home_folder_may_be_written_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert made(output_dir="~/runs/a").folder == Path("/home/ada/runs/a")


@pytest.mark.parametrize(
    ("precision", "written"),
    [
        (Precision(), "float32"),
        (Precision(dtype="bfloat16"), "bfloat16"),
        (Precision(dtype="float16", level="O2"), {"dtype": "float16", "level": "O2", "scale": 65536.0}),
    ],
)
def test_a_precision_is_written_as_a_word_where_one_is_enough(precision: Precision, written: object) -> None:
    recipe = made(train=Train(length=Length(1, "epochs"), batch=8, precision=precision))
    assert recipe.model_dump(mode="json")["train"]["precision"] == written
