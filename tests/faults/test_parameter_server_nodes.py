"""A parameter server on two machines: servers on the first, and workers that may be lost on the other one."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.faults.namespaces import begin, finish, kill_node, needs_root, pull
from tests.faults.slow_run import are_right, at_step, right_weights

pytestmark = [pytest.mark.long, needs_root, pytest.mark.timeout(240)]
SLOW = {"recipe": "tests/faults/slow.yaml", "ranks": 2}
FAULTY = {"recipe": "tests/faults/faulty.yaml", "ranks": 2}
ASYNC = "strategy={use: parameter_server, mode: async}"


def nodes(spaces: list[str], out: Path, *overrides: str, **how: Any) -> list[subprocess.Popen[str]]:
    return [begin(space, node, out, "train", *overrides, **how) for node, space in enumerate(spaces)]


def test_in_step_two_machines_are_one(spaces: list[str], tmp_path: Path) -> None:
    words = ["strategy={use: parameter_server, servers: 1}", "train.length=40 steps"]
    right = right_weights(tmp_path / "alone", 4, "tests/faults/slow.yaml", *words)
    ended = finish(nodes(spaces, tmp_path / "run", *words, job=SLOW, env={"SLOW": "0"}))
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert are_right(tmp_path / "run", right) == 0


@pytest.mark.parametrize("fault", ["forward 3 6 kill", "forward 2 6 raise"])
def test_a_worker_that_dies_on_the_other_machine_is_left_behind(
    spaces: list[str], tmp_path: Path, fault: str
) -> None:
    ended = finish(nodes(spaces, tmp_path / "run", ASYNC, job=FAULTY, env={"FAULT": fault}))
    assert [status for status, _, _ in ended] == [0, 0], ended
    rank = int(fault.split()[1])
    how = "ValueError: the culprit's own words" if "raise" in fault else "ended by SIGKILL in"
    named = all(f"worker {rank - 1} (rank {rank}) is lost: {how}" in said for _, _, said in ended)
    assert named, ended
    assert (tmp_path / "run" / "checkpoints" / "step-00000016").is_dir()


@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_machine_with_workers_alone_is_left_behind(spaces: list[str], tmp_path: Path, how: str) -> None:
    """Cut off, it is known to be lost only when nothing has been heard of it for 20 s, and then the others go on."""
    out = tmp_path / "run"
    both = nodes(spaces, out, ASYNC, job=SLOW)
    at_step(out, 40)
    kill_node(both[1]) if how == "killed" else pull(spaces, 1, plugged=False)
    ended = finish(both[:1] if how == "killed" else both)
    status, _, said = ended[0]
    named = "node 1 (" in said and "The others go on without it." in said
    assert status == 0 and named, ended
    assert (out / "checkpoints" / "step-00000300").is_dir()


def test_without_any_worker_the_job_ends(spaces: list[str], tmp_path: Path) -> None:
    ended = finish(
        nodes(spaces, tmp_path / "run", ASYNC, job={**FAULTY, "ranks": 1}, env={"FAULT": "forward 1 6 kill"})
    )
    assert all(status for status, _, _ in ended), ended
    assert all("worker 0 (rank 1) is lost: ended by SIGKILL in" in said for _, _, said in ended), ended
    assert "has lost the last worker" in ended[0][2]


def test_under_async_average_a_lost_rank_ends_the_job_and_is_named(spaces: list[str], tmp_path: Path) -> None:
    words = ("strategy={use: async_average}", "callbacks=[{use: tests.faults.parts.Hang}]")
    ended = finish(nodes(spaces, tmp_path / "run", *words, job=FAULTY, env={"FAULT": "forward 3 6 kill"}))
    assert [status for status, _, _ in ended] == [137, 137], ended
    assert all("rank 3 of 4" in said and "SIGKILL" in said for _, _, said in ended), ended
