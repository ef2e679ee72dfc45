"""A job whose number of ranks changes as it goes: its losses are those of one process, whatever the sizes were."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from paddle_dp.certificate.certificate import read
from paddle_dp.proof.certified import folder_checks
from tests.faults.slow_run import RECIPE, are_right, at_step, losses, right_weights

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def right(alone: Path) -> dict[str, np.ndarray]:
    return right_weights(alone)


def sizes(out: Path) -> list[int]:
    """The number of ranks of each attempt."""
    return [len(list(attempt.glob("workerlog.*"))) for attempt in sorted((out / "logs").glob("attempt-*"))]


def compare(out: Path, alone: Path, right: dict[str, np.ndarray], steps: int = 300) -> None:
    """Every step's loss, and the weights at the end, are those of one process to 1e-6."""
    mine, theirs = losses(out), losses(alone / "run")
    assert mine.keys() == theirs.keys() and len(theirs) == steps
    difference = max(abs(mine[step] - theirs[step]) / abs(theirs[step]) for step in theirs)
    last = are_right(out, right)
    path = " -> ".join(map(str, sizes(out)))
    print(
        f"{path} ranks, {steps} losses differ from one process's by {difference:.1e} at most, weights by {last:.1e}"
    )
    for step in (1, *(steps * n // 5 for n in range(1, 6))):
        print(f"step {step}: {theirs[step]:.7f} on 1 rank, {mine[step]:.7f} on {path}")
    assert difference < 1e-6 and last < 1e-6
    certificate = read(out)
    assert [attempt["ranks"] for attempt in certificate["attempts"]] == sizes(out)
    checks = [*folder_checks(certificate, out)]
    assert all(good for good, _ in checks), checks
    assert sum("went on with the same weights" in line for _, line in checks) == len(sizes(out)) - 1, checks


def test_four_two_three_four(start, alone, right):
    job = start("train", ranks=4, recipe=RECIPE, least_ranks=1)
    step = at_step(job.out, 40)
    for number in (2, 3, 4):
        (job.out / "ranks").write_text(f"{number}\n")
        step = at_step(job.out, step + 50)
    status, _, complained = job.finish(timeout=120)
    assert status == 0, complained
    assert sizes(job.out) == [4, 2, 3, 4], complained
    compare(job.out, alone, right)


def test_spares_take_more_places_and_fewer(start, alone, right):
    """With one thread for each rank, any number of them is forked from the processes that wait."""
    variables = {"OMP_NUM_THREADS": "1"}
    job = start("train", ranks=3, recipe=RECIPE, least_ranks=1, restarts=3, spares=True, env=variables)
    step = at_step(job.out, 40)
    for number in (2, 3):
        (job.out / "ranks").write_text(f"{number}\n")
        step = at_step(job.out, step + 50)
    status, _, complained = job.finish(timeout=120)
    assert status == 0, complained
    assert sizes(job.out) == [3, 2, 3], complained
    launchers = [attempt / "launcher.log" for attempt in sorted((job.out / "logs").glob("attempt-*"))]
    assert [bool(log.stat().st_size) for log in launchers] == [True, False, False]
    compare(job.out, alone, right)


def test_only_sizes_that_the_layout_allows_are_taken(start, tmp_path):
    """Two ranks share each layer: of 3 ranks that can be had, 2 are taken, and the screen says why."""
    recipe = "tests/faults/slow_hybrid.yaml"
    right = right_weights(tmp_path, 1, recipe, "strategy={use: single}")
    job = start("train", ranks=4, recipe=recipe, least_ranks=1)
    step = at_step(job.out, 20)
    for number in (3, 4):
        (job.out / "ranks").write_text(f"{number}\n")
        step = at_step(job.out, step + 30)
    status, _, complained = job.finish(timeout=120)
    print(complained)
    assert status == 0, complained
    assert sizes(job.out) == [4, 2, 4], complained
    assert "2 of at most 4 ranks: " in complained and "3 cannot train it: " in complained
    compare(job.out, tmp_path, right, steps=120)


def test_a_rank_that_fails_again_and_again_is_left_out(start, found, alone, right):
    job = start("train", ranks=3, recipe=RECIPE, least_ranks=2, restarts=4)
    for _ in range(2):
        pids = job.training_pids(3, steps=5)
        os.kill(pids[2], signal.SIGKILL)
        begun = time.monotonic()
        while Path(f"/proc/{pids[0]}").exists():
            time.sleep(0.02)
        seconds = time.monotonic() - begun
    status, _, complained = job.finish(timeout=120)
    assert status == 0, complained
    assert sizes(job.out) == [3, 3, 2], complained
    named = "2 of at most 3 ranks: rank 2 was the first to fail 2 times in a row" in complained
    found("elastic: rank 2 of 3 is killed twice, 2 go on", seconds, named)
    assert named
    compare(job.out, alone, right)
