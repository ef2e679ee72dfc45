"""One recipe on one rank, on three, and stopped in an epoch on two and resumed on three: the numbers of each step."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.house.training import build_trainer, recorded
from tests.ranks import run_ranks


def learn(recipe: str, folder: str, until: str, resume: bool = False) -> list[list[float]]:
    """Trains a recipe in a rank, and returns the numbers of each step."""
    trainer = build_trainer(recipe, folder, resume=resume)
    rows = recorded(trainer)
    trainer.fit(until)
    return rows


def assert_learned_on_any_ranks(recipe: str, folder: Path, steps: int, stop: int) -> None:
    """Asserts that three ranks learn what one does, also when two of them stop after `stop` steps and three go on."""
    alone = run_ranks(learn, 1, recipe, str(folder / "1"), f"{steps} steps")[0]
    for rows in run_ranks(learn, 3, recipe, str(folder / "3"), f"{steps} steps"):
        np.testing.assert_allclose(rows, alone, rtol=1e-5)
    run_ranks(learn, 2, recipe, str(folder / "2"), f"{stop} steps")
    for rows in run_ranks(learn, 3, recipe, str(folder / "2"), f"{steps} steps", resume=True):
        np.testing.assert_allclose(rows, alone[stop:], rtol=1e-5)
