"""Checks recipes on the screen: one line for each that is right, every mistake of those that are not."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from paddle_dp.errors import RecipeError
from paddle_dp.recipe.read import read_recipe
from paddle_dp.recipe.schema import Recipe


def check_all(files: Iterable[Path]) -> int:
    """Prints a line a recipe; mistakes go to stderr. Returns the exit status: 0, or 2 with any mistake."""
    status = 0
    for file in files:
        try:
            print(f"{file}: {in_short(read_recipe(file))}", flush=True)
        except RecipeError as error:
            print(error, file=sys.stderr, flush=True)
            status = error.exit_status
    return status


def in_short(recipe: Recipe) -> str:
    """«mlp on digits, adamw, data_parallel: 12 epochs of batches of 64»."""
    parts = f"{recipe.model.name} on {recipe.dataset.name}, {recipe.optimizer.name}, {recipe.strategy.name}"
    return f"{parts}: {recipe.train.length} in batches of {recipe.train.batch}"
