"""The shelves on the screen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.part import SHELVES
from paddle_dp.recipe.listing import listing


def screen(shelf: str | None = None, part: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(listing(shelf, part))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_all_shelves_with_the_first_docstring_lines() -> None:
    shown = screen()
    assert all(f"\n{shelf}" in f"\n{shown}" for shelf in SHELVES)
    assert "Half a cosine from the peak to the floor" in shown and "warmup" not in shown


def test_one_shelf_with_settings() -> None:
    lines = [line.split("  ") for line in screen("schedules").splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert [
        "learning_rate",
        "must be given",
        "number, 0 or more",
        "The peak: the rate after the warm-up.",
    ] in rows
    assert [
        "warmup",
        "0 steps",
        "quantity such as 3 epochs",
        "Length of the warm-up, in which the rate rises linearly.",
    ] in rows


def test_one_part_with_what_its_config_says() -> None:
    shown = screen("strategies", "data_parallel")
    assert "sync_batch_norm" in shown and "Whether a parameter may have no gradient" in shown
    assert "single" not in shown


def test_a_class_from_elsewhere() -> None:
    assert "nhead" in screen("models", "paddle.nn.Transformer")


def test_what_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"There is no schedule 'cosin'. Did you mean 'cosine'"):
        screen("schedules", "cosin")
    with pytest.raises(UsageError, match=r"There is no shelf 'shedules'. Did you mean 'schedules'"):
        screen("shedules")
    with pytest.raises(RecipeError, match="no package or file 'nowhere'"):
        screen("models", "nowhere.Net")
