"""Paddle's launcher, started before it is known what to launch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.launch.command import Job, Plan
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.prelaunch import PreparedLauncher
from paddle_dp.launch.processes import alive

PLAN = Plan(job=Job(recipe=Path("r.yaml"), ranks=2), machine=Machine(cores=2), ranks=2)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the launcher: writes the line that it is given, and its environment."""
    file = tmp_path / "program.py"
    file.write_text(
        "import os, sys\n"
        f"line = sys.stdin.readline(); open({str(tmp_path / 'line')!r}, 'w').write(line + repr(dict(os.environ)))\n"
    )
    monkeypatch.setattr("paddle_dp.launch.prelaunch.PROGRAM", file)
    return file


def given(**more: str) -> dict[str, Any]:
    from paddle_dp.launch.command import environment

    return {**environment(PLAN, os.environ), "PADDLE_DP_JOB": "1-2", **more}


@pytest.mark.processes
def test_it_is_told_what_to_launch_and_secrets_are_not_in_its_environment(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PADDLE_DP_TOKEN", "hush")
    with PreparedLauncher(PLAN, os.environ) as ahead:
        launcher = ahead.begin(PLAN, given(), tmp_path)
        assert launcher is not None and launcher.wait() == 0
        assert ahead.begin(PLAN, given(), tmp_path) is None  # there is one, for the first attempt
    said = (tmp_path / "line").read_text()
    assert '"--nproc_per_node", "2"' in said and str(tmp_path / "launcher.log") in said
    assert "hush" not in said and "PADDLE_DP_JOB" in said


@pytest.mark.processes
def test_for_another_environment_another_is_started(program: Path, tmp_path: Path) -> None:
    with PreparedLauncher(PLAN, os.environ) as ahead:
        assert ahead.begin(PLAN, given(OMP_NUM_THREADS="77"), tmp_path) is None


@pytest.mark.processes
def test_of_a_job_that_is_refused_nothing_is_left(program: Path) -> None:
    program.write_text("import time; time.sleep(60)")
    with PreparedLauncher(PLAN, os.environ) as ahead:
        assert ahead._launcher is not None
        pid, began = ahead._launcher.pid, time.monotonic()
    assert not alive(pid) and time.monotonic() - began < 5
