"""What other jobs leave behind, do at the same time, or have not prepared, does not disturb this one."""

from __future__ import annotations

import ast
import os
import pty
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.launch.command import Job
from paddle_dp.launch.processes import alive, kill_all
from tests.faults.conftest import ROOT, supervisors
from tests.house.forked_jobs import ForkedSupervisor
from tests.jobs import run_in_one_fork


@pytest.mark.long
@pytest.mark.parametrize("times", [1, pytest.param(40, marks=pytest.mark.timeout(3600))])
def test_two_jobs_at_once_do_not_meet(start, times):
    """The long one counts starts, each beside another: no port is taken by somebody else, nothing else is said."""
    failed = []
    for _ in range(times):
        for job in [start("say") for _ in range(2)]:
            status, said, complained = job.finish()
            if (status, said.splitlines()[1:]) != (0, ["rank 0 of 2 says 3"]):
                failed.append(f"{status}\n{said}{complained}")
    assert not failed, f"{len(failed)} of {2 * times} starts:\n" + "\n".join(failed)


LEFTOVERS = {
    "PADDLE_NNODES": "2", "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "4", "PADDLE_MASTER": "10.1.2.3:4",
    "PADDLE_TRAINER_ENDPOINTS": "10.1.2.3:1,10.1.2.4:2", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "1",
    "CUDA_VISIBLE_DEVICES": "", "PADDLE_DP_OPTIONS": '{"resume": "other"}',
    "PADDLE_DP_TTY": "/dev/tty",
}  # fmt: skip
SECRET = "only for the ranks, " + "1234 5678"  # whole nowhere, not even here


@pytest.fixture(scope="module")
def attempts(tmp_path_factory):
    """A job of one rank, then one of two in the same folder, where others have left their variables, in which rank 1
    raises at the end: (folder, ends, seconds from this on, what was left, what each rank had started)."""
    out = tmp_path_factory.mktemp("attempts") / "shared"
    left = {**LEFTOVERS, "OMP_NUM_THREADS": "3", "SECRET_TOKEN": SECRET}
    words = {"output_dir": str(out), "env": left}
    with supervisors(out.parent, forks="supervisor") as start:
        ends = {1: start("tell_environment", ranks=1, **words).finish()}
        job = start("tell_environment", **words, extra={"mine": 1, "fault": "raise"})
        job.rank_pids(2)
        begun = time.monotonic()
        ends[2] = job.finish()
        seconds = time.monotonic() - begun
        return out, ends, seconds, job.left(), [int(path.read_text()) for path in job.pids.glob("child.*")]


@pytest.mark.parametrize("ranks", [1, 2])
def test_leftovers_in_the_environment_are_ignored(attempts, ranks):
    status, said, complained = attempts[1][ranks]
    assert status == ranks - 1, complained
    assert f"rank 0 of {ranks} says" in said


def test_a_raise_in_rank_1_is_the_last_traceback_on_the_screen(attempts):
    out, ends, seconds, left, _ = attempts
    status, said, complained = ends[2]
    assert seconds < 25  # Paddle's launcher alone takes 32 s
    assert status == 1 and not left
    lines = [line for line in complained.splitlines() if not line.startswith("then rank 0: ")]
    assert lines[-3] == "ValueError: the culprit's own words"
    assert lines[-2].startswith("rank 1 of 2 on ") and lines[-2].endswith(" failed first")
    log = out / "logs" / "attempt-002" / "workerlog.1"
    assert lines[-1] == f"log: {log}" and "the culprit's own words" in log.read_text()
    assert (said + complained).count("Traceback") == 1  # rank 0's lost peer is in its log only


def test_what_a_rank_started_ends_with_the_job(attempts):
    """Also in a session of its own, when its parent is gone."""
    assert len(attempts[-1]) == 2 and not any(map(alive, attempts[-1]))


def test_threads_and_options_reach_the_ranks(attempts):
    headline, environment, options, _ = attempts[1][2][1].splitlines()
    assert "3 threads each" in headline
    assert ast.literal_eval(environment) == {
        "OMP_NUM_THREADS": "3", "PADDLE_NNODES": "1", "CUDA_VISIBLE_DEVICES": None, "MASTER_ADDR": None,
    }  # fmt: skip
    ours = {"mine", "fault", "pids"}
    assert set(ast.literal_eval(options)) == ours | {"resume", "output_dir", "claimed", "older"}


def test_logs_are_private_and_each_attempt_has_its_own(attempts):
    logs = sorted((attempts[0] / "logs").iterdir())
    assert [path.name for path in logs] == ["attempt-001", "attempt-002"]
    assert stat.S_IMODE(attempts[0].stat().st_mode) == 0o700
    for attempt in logs:
        assert stat.S_IMODE(attempt.stat().st_mode) == 0o700
    assert "rank 0 of 2 says 3" in (logs[1] / "workerlog.0").read_text()
    assert "LAUNCH INFO" in (logs[1] / "launcher.log").read_text()


def test_no_file_of_a_run_holds_the_environment(attempts):
    files = [path for path in attempts[0].rglob("*") if path.is_file()]
    assert any(path.name == "envlog.0" for path in files)  # Paddle's launcher has written what it had
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_cannot_be_written_is_one_message_before_anything_starts(tmp_path, ranks):
    (tmp_path / "file").touch()
    status, said, complained = refused(ranks=ranks, output_dir=str(tmp_path / "file" / "run"))
    assert (status, said) == (2, "")
    assert complained.count("\n") == 1 and "cannot be written (Not a directory)" in complained
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"ranks": 0}, "--ranks 0"),
    ({"ranks": None, "devices": [0, 1]}, "--devices 0,1"),
    ({"nodes": 2, "node_rank": 0}, "--master HOST:PORT"),
    ({"recipe": "tests/faults/none.yaml"}, "none.yaml"),
    ({"overrides": ["optimizer.lrr=0.1"]}, "lrr"),
    ({"resume": "runs/none/checkpoints/step-00000001"}, "there is no such checkpoint"),
]


def refused(**words: Any) -> tuple[int, str, str]:
    """The end of a job that is refused before a rank of it starts."""
    say = {
        "recipe": "tests/faults/tiny.yaml",
        "entry_point": "tests.faults.entry_points:say",
        "ranks": 2,
        **words,
    }
    return run_in_one_fork(Job(**{**say, "recipe": Path(say["recipe"])}), ROOT)


def test_a_mistake_is_one_message_and_no_run_folder(tmp_path):
    for number, (words, sentence) in enumerate(MISTAKES):
        out = tmp_path / str(number)
        status, said, complained = refused(**words, output_dir=str(out))
        assert (status, said) == (2, "") and sentence in complained and "Traceback" not in complained
        assert not out.exists()


def test_on_a_terminal_rank_0_draws_there_itself(tmp_path):
    """The supervisor shows nothing of the log, and passes the terminal's name on."""
    job = {
        "entry_point": "tests.faults.entry_points:write_to_terminal",
        "ranks": 2,
        "recipe": "tests/faults/tiny.yaml",
        "output_dir": str(tmp_path / "run"),
    }
    ours, theirs = pty.openpty()
    process = ForkedSupervisor(job, os.environ, tmp_path / "job", screen=os.ttyname(theirs))
    try:
        status = process.wait()
    finally:
        kill_all(process.left)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # how Linux says that nobody has the terminal open any more
        pass
    assert status == 0, seen
    os.close(ours)
    lines = seen.decode().replace("\r", "").splitlines()
    assert lines[1:] == ["drawn by rank 0"] and lines[0].startswith("2 ranks on CPU")
