"""`paddle-dp verify`: runs both sides in real processes, compares them, prints the tables and the verdict."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paddle_dp.errors import UsageError
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.launch.waiting import WaitingRanks
from paddle_dp.proof.rehearsed import Rehearsals, sentence
from paddle_dp.proof.report import as_json, show
from paddle_dp.proof.sides import Comparison
from paddle_dp.proof.verdict import DIFFERENT, compare_sides
from paddle_dp.recipe import read_recipe


def verify(
    path: Path,
    overrides: Sequence[str] = (),
    ranks: int = 2,
    steps: int = 8,
    as_text: bool = True,
    rehearse: bool = False,
) -> int:
    """Compares the recipe's first steps on one process and on `ranks`; prints; returns the exit status.

    With `rehearse`, the training itself as well: an evaluation, a checkpoint, two more epochs, a resume.

    0: the same. 1: different. 3: nothing was learned, so nothing is proven, or the numbers are finite up to some step
    only. 4: one side failed in float64, and the other did not. Where ranks round their gradients (reduce_dtype), each
    step is compared by itself, from the weights that they had, in a rehearsal, too.

    Raises UsageError for fewer than 2 ranks or 1 step, and for a recipe that asks for something else than one process
    learns, RecipeError for a recipe with mistakes, JobError (exit status 4)
    when a side could not be run, or 2 where a side refused the layout, or the machine has too little memory or disk:
    the ranks go first, so nothing is computed for a layout that cannot be.
    """
    recipe, begun = read_recipe(path, overrides), time.perf_counter()
    parts = recipe.strategy.config.parts
    if ranks * parts < 2 or steps < 1:
        raise UsageError(
            f"verify compares one process with 2 ranks or more, over 1 step or more: not with {ranks}, over {steps}."
        )
    strategy = recipe.strategy.config
    if not strategy.compared_by_step and (why := strategy.not_promised(recipe)):
        raise UsageError(f"nothing was compared: {why}")
    with scratch_folder("paddle-dp-verify-") as scratch, WaitingRanks() as waiting:
        comparison = Comparison(
            Path(path), tuple(overrides), steps, ranks * parts, scratch, rehearse=rehearse, waiting=waiting
        )
        _announce(steps, ranks)
        many = comparison.many(ranks)
        _announce(steps, 1)
        verdict = compare_sides(comparison.one([many]), many)
        found = None
        if rehearse:
            found = Rehearsals.read(verdict.one.rehearsed(many), many.folder, ranks).first_difference()
        if as_text:
            show(recipe, verdict, time.perf_counter() - begun)
            if rehearse:
                print(sentence(found, ranks, many.rounds_to))
        else:
            said = as_json(recipe, verdict, time.perf_counter() - begun)
            more = {"rehearsal": None if found is None else asdict(found)} if rehearse else {}
            print(json.dumps(said | more, indent=2))
        return verdict.status if found is None else DIFFERENT


def _announce(steps: int, ranks: int) -> None:
    print(
        f"running 2 steps in float64 and {steps} in the recipe's precision on {ranks} rank{'s' * (ranks > 1)} …",
        file=sys.stderr, flush=True,
    )  # fmt: skip
