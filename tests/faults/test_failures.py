"""A rank that fails: the cause stands last on the screen, the exit status is its own, and nothing is left.

Another that Paddle's launcher has started is in test_surroundings.py.
"""

from __future__ import annotations

import json
import re
import shlex
import time

import pytest

from paddle_dp.launch.command import Job
from tests.faults.conftest import ROOT
from tests.house.programs import run_python
from tests.house.recipes import small_recipe
from tests.house.runs import events
from tests.jobs import run_in_one_fork

CULPRIT = "the culprit's own words"
CALLBACKS = "[{use: metrics, every: 20 steps}, {use: checkpoint, every: 20 steps}%s]"
RECIPE = small_recipe("length: 60 steps, batch: 64", optimizer="sgd", callbacks=CALLBACKS)
KILLER = ", {use: tests.faults.killer.KillsRank1Once, step: 45, note: %s}"


def test_a_raise_ends_ranks_that_sleep(fork):
    job = fork("raise_while_others_sleep", ranks=2)
    job.rank_pids(2)
    begun = time.monotonic()
    status, _, complained = job.finish()
    assert time.monotonic() - begun < 25  # Paddle's launcher alone takes 32 s
    assert status == 1 and CULPRIT in complained and not job.left()


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("segv", 139, "string_at(.|\n)*failed first: ended by SIGSEGV"),
        # What a rank says of its own error is held to words and statuses in launch/test_failures.py.
        pytest.param("exit 3", 3, r"SystemExit: 3\n(\(\d+ frames .*\n)?rank 1 of 2", marks=pytest.mark.long),
        (
            "leave early",
            1,
            r"rank 1 of 2 .* left with (exit status 0|an unknown exit status) while the job was running",
        ),
        pytest.param("data error", 1, r"\Aphoto.jpg cannot be read\nrank 1 of 2", marks=pytest.mark.long),
    ],
)
def test_the_cause_is_told_and_its_status_returned(request, fault, status, words):
    """The one that a signal ends is a rank that Paddle's launcher has started."""
    start = request.getfixturevalue("launch" if fault == "segv" else "fork")
    found, _, complained = start("spoil", extra={"fault": fault}).finish()
    assert found == status, complained
    assert re.search(words, complained), complained


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_can_be_mended_by_typing_is_the_message_alone(fork, ranks):
    """What ranks that were started refuse is in test_refused_start.py."""
    status, _, complained = fork("refuse", ranks=ranks).finish()
    assert (status, complained) == (2, "this recipe needs 4 ranks. Start it with --ranks 4.\n")


def test_one_rank_fails_in_its_own_words(fork):
    job = fork("raise_alone", ranks=1)
    status, _, complained = job.finish()
    assert status == 1 and complained.rstrip().endswith(f"ValueError: {CULPRIT}")
    assert complained.count("Traceback") == 1 and "launch/recipe_rank.py" not in complained
    (written,) = job.out.glob("logs/attempt-001/failure.rank-0.json")
    assert json.loads(written.read_text())["kind"] == "ValueError"


@pytest.mark.long
@pytest.mark.timeout(180)
def test_what_the_screen_ends_with_goes_on_where_a_killed_rank_had_saved(start, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE % KILLER % (tmp_path / "killed"))
    job = start("train", recipe=str(recipe), overrides=["train.batch=48"])
    status, _, complained = job.finish()
    *_, cause, log, hint = [line for line in complained.splitlines() if not line.startswith("then rank")]
    assert status == 137 and re.match("rank 1 of 2 on .* failed first: ended by SIGKILL", cause), complained
    assert log.startswith("log: ")
    words = rf"train {recipe} train.batch=48 --ranks 2 --output-dir {job.out} --resume"
    found = re.fullmatch(f"go on from step 40: paddle-dp ({words})", hint)
    assert found, hint
    run_python("-m", "paddle_dp", *shlex.split(found[1]), timeout=90)
    assert [row["step"] for row in events(job.out, "step")] == [20, 40, 60]


def test_where_nothing_was_saved_the_screen_says_so(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((RECIPE % "").replace("cross_entropy", "tests.faults.entry_points.broken_loss"))
    out = tmp_path / "run"
    status, _, complained = run_in_one_fork(Job(recipe=recipe, ranks=1, output_dir=str(out)), ROOT)
    assert status == 1
    nothing = f"nothing to go on from: there is no usable checkpoint in {out}/checkpoints yet\n"
    assert f"\nValueError: {CULPRIT}\n" in complained and complained.endswith(nothing)
