"""Recipes: read from YAML and the command line, checked as a whole, and written with all defaults.

Reading imports no paddle and starts nothing; all mistakes are reported together, each with its line. `part/` reads the
settings of a single part; `assembly/` turns a recipe into a trainer.
"""

from paddle_dp.recipe.read import foreign_code, read_recipe
from paddle_dp.recipe.recipe import Recipe, check_callbacks, check_turns, json_schema
from paddle_dp.recipe.schema import (
    Ema,
    EvaluationSettings,
    Guard,
    Load,
    LoaderSettings,
    Mix,
    TurnSettings,
)  # fmt: skip
from paddle_dp.recipe.train_schema import BatchRamp, Precision, Train
from paddle_dp.recipe.write import resolved, write_recipe

__all__ = [
    "BatchRamp", "Ema", "EvaluationSettings", "Guard", "Load", "LoaderSettings", "Mix", "Precision", "Recipe", "Train",
    "TurnSettings", "check_callbacks", "check_turns", "foreign_code", "json_schema", "read_recipe", "resolved",
    "write_recipe",
]  # fmt: skip
