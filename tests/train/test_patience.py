"""How long an exchange waits for a late rank: never shorter than the watch allows that rank to be late."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.assembly.entry_points import BEYOND, patience
from paddle_dp.mesh.heartbeat import VARIABLE
from paddle_dp.recipe import read_recipe

WATCHED = {VARIABLE: "/proc/1/fd/3", "PADDLE_NNODES": "1"}


@pytest.mark.parametrize(
    ("overrides", "variables", "seconds"),
    [
        ([], WATCHED, 1800 + BEYOND),  # rank 0 may be in a callback for 1800 s
        (["watch.callbacks=7200 s"], WATCHED, 7200 + BEYOND),
        (["watch.patience=7200 s"], WATCHED, 7200 + BEYOND),  # a step that is known to take long
        (["watch.start=7200 s"], WATCHED, 7200 + BEYOND),
        (["loader.timeout=7200 s"], WATCHED, 7200 + BEYOND),
        (["train.patience=10800 s"], WATCHED, 10800),
        ([], {**WATCHED, "PADDLE_NNODES": "2"}, 600),  # a node that is gone has no watch that could see it
        ([], {}, 600),
        (["train.patience=9 s"], {}, 9),
    ],
)
def test_the_watch_has_the_first_word(overrides, variables, seconds):
    recipe = read_recipe(Path("configs/digits_mlp.yaml"), overrides)
    assert patience(recipe, variables) == seconds
