"""`paddle-dp verify`: runs both sides in real processes, compares them, prints the tables and keeps the verdict."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path

from paddle_dp.checkpoint import newest
from paddle_dp.checkpoint.folder import find_at
from paddle_dp.errors import UsageError
from paddle_dp.launch.prepared_ranks import WaitingRanks
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.proof.rehearsed import RehearsalComparison, rehearsal_sentence
from paddle_dp.proof.report import as_json, show
from paddle_dp.proof.sides import SideRunner
from paddle_dp.proof.verdict import DIFFERENT, compare_sides
from paddle_dp.recipe import read_recipe
from paddle_dp.text import plural


def verify(  # noqa: PLR0913 - the options of the command
    path: Path,
    overrides: Sequence[str] = (),
    ranks: int = 2,
    steps: int = 8,
    as_text: bool = True,
    rehearse: bool = False,
    at: str | None = None,
) -> int:
    """Compares the recipe's first steps on one process and on `ranks`; prints; returns the exit status.

    `at`: compares the steps after a checkpoint instead: its path, or a number of updates, for the newest checkpoint of
    the recipe's run that is not later. `rehearse`: compares a training, too, with an evaluation, a checkpoint, two more
    epochs and a resume. Without `as_text`, stdout gets one JSON object and nothing else.

    0: the same. 1: different. 3: nothing was learned, or one process's noise would hide a fault of 10 % of a gradient,
    so nothing is proven, or the numbers are finite up to some step only. 4: one side failed in float64, and the other
    did not. If ranks round their gradients (reduce_dtype), each step is compared by itself, from the ranks' weights,
    also in a rehearsal.

    Raises UsageError for fewer than 2 ranks or 1 step, and for a recipe that does not promise one process's result,
    RecipeError for a recipe with mistakes, JobError if a side could not run: exit status 4, or 2 if a side refused the
    layout, or the machine has too little memory or disk. The first batch runs first, on one process, so that a mistake
    in a model or a loss is reported once; then the ranks, so that an impossible layout costs no more.
    """
    recipe, begun = read_recipe(path, overrides), time.perf_counter()
    strategy = recipe.strategy.config
    batch_shares = strategy.batch_chunks
    if ranks * batch_shares < 2 or steps < 1:
        raise UsageError(
            f"verify compares one process with 2 ranks or more, over 1 step or more: not with {ranks}, over {steps}."
        )
    if not strategy.compared_by_step and (reason := strategy.not_promised(recipe)):
        raise UsageError(f"nothing was compared: {reason}")
    start = None if at is None else _checkpoint(at, recipe.folder)
    with (
        nullcontext() if as_text else _nothing_on_stdout(),
        scratch_folder("paddle-dp-verify-") as scratch,
        WaitingRanks() as waiting,
    ):
        runner = SideRunner(
            Path(path), tuple(overrides), steps, ranks * batch_shares, scratch, rehearse=rehearse, waiting=waiting,
            start=start,
        )  # fmt: skip
        runner.first_forward()
        _announce(steps, ranks, start)
        candidate = runner.run_candidate(ranks)
        _announce(steps, 1, start)
        verdict = compare_sides(runner.run_reference([candidate]), candidate)
        difference = None
        if rehearse:
            difference = RehearsalComparison.read(
                verdict.reference.rehearsed(candidate), candidate.folder, ranks
            ).first_difference()
        report = as_json(recipe, verdict, time.perf_counter() - begun)
        status = verdict.status if difference is None else DIFFERENT
    if as_text:
        show(recipe, verdict, time.perf_counter() - begun)
        if rehearse:
            print(rehearsal_sentence(difference, ranks, candidate.rounds_to))
    else:
        more = {"rehearsal": None if difference is None else asdict(difference)} if rehearse else {}
        print(json.dumps(report | more, indent=2))
    if at is None or status:  # later steps alone prove no training from its start
        from paddle_dp.certificate import verified  # imports paddle, which decides OpenMP's settings

        result = {"recipe": recipe.name, "steps": steps, "rehearsed": rehearse}
        if line := verified.keep(recipe, status, candidate.facts["verdict record"] | result):
            print(line, file=sys.stderr, flush=True)
    return status


def _checkpoint(at: str, folder: Path) -> Path:
    """The checkpoint at a path, or the run's newest with `at` updates at most. Raises UsageError if there is none."""
    if not at.isdecimal():
        return find_at(Path(at))
    checkpoint = newest(folder / "checkpoints", until=int(at))
    if checkpoint is None:
        raise UsageError(
            f"nothing was compared: {folder} has no checkpoint of step {at} or before it. Train the recipe with "
            "{use: checkpoint, every: …} among its callbacks, or give the path of a checkpoint."
        )
    return checkpoint


@contextmanager
def _nothing_on_stdout() -> Iterator[None]:
    """Context in which the stdout of this process and its children goes to stderr."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def _announce(steps: int, ranks: int, start: Path | None) -> None:
    run = f"2 steps in float64 and {steps} in the recipe's precision"
    after = "" if start is None else f" from {start.name} on"
    print(f"running {run}{after} on {plural(ranks, 'rank')} …", file=sys.stderr, flush=True)
