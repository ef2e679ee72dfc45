"""What to do: a recipe, read from YAML and the command line, checked as a whole, and written down again.

Nothing here imports paddle or starts anything; a mistake is placed on its line and told with all the others.
What a single part takes is known in `part/`; what is made of a recipe, in `train/`.
"""

from paddle_dp.recipe.editor import json_schema
from paddle_dp.recipe.precision import Precision
from paddle_dp.recipe.read import read_recipe
from paddle_dp.recipe.schema import LoaderSettings, Recipe, Train
from paddle_dp.recipe.write import resolved, write_recipe

__all__ = [
    "LoaderSettings",
    "Precision",
    "Recipe",
    "Train",
    "json_schema",
    "read_recipe",
    "resolved",
    "write_recipe",
]
