"""Forks of waiting ranks are as fresh as started ranks; a job that fails or is stuck takes nothing with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.launch.attempts import supervise
from paddle_dp.launch.command import Job, LaunchPlan, argv, environment
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.prepared_ranks import PreparedLauncher, WaitingRanks, _answer, launched
from paddle_dp.launch.processes import Signals, alive, descendants, is_stopped, kill_all
from paddle_dp.launch.supervisor import ExternalEvents, JobEnd
from tests.eventually import eventually

RECIPE = Path("tests/faults/tiny.yaml").resolve()
# Where the files of one attempt are, its own ports, and what only Paddle's launcher says.
OF_ONE = re.compile(
    r"PADDLE_LOG_DIR|PORT_RANGE|POD_NAME|PADDLE_BACKUP_ENV_PATH|PADDLE_DP_(JOB|HEARTBEAT|ENVIRONMENT|RANKS_SECRET)"
)


def tell(recipe, options):
    """An entry point: writes what the rank was started with, and what it has done so far."""
    import json
    import random
    import sys

    import numpy as np
    import paddle

    rank, folder = os.environ["PADDLE_TRAINER_ID"], Path(options["folder"])
    told = {n: re.sub(r"\d{4,}", "N", v) for n, v in os.environ.items() if not OF_ONE.match(n)}
    endpoint = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[int(rank)]
    (folder / f"told.{rank}").write_text(
        json.dumps({
            "same": {
                "environment": told, "arguments": sys.argv[1:], "path": [p for p in sys.path if p],
                "endpoint is its own": endpoint == os.environ["PADDLE_CURRENT_ENDPOINT"],
                "session is its own": os.getsid(0) == os.getpid(), "folder": os.getcwd(),
                "joined": paddle.distributed.is_initialized(), "read": sys.stdin.read(),
            },
            "drawn": [random.random(), np.random.rand(), paddle.rand([1]).item(), hash("the order of sets")],
        })
    )  # fmt: skip
    print("a rank's own words")


def misbehave(recipe, options):
    """An entry point: rank 1 does what it is told to."""
    import subprocess
    import sys
    import time

    if os.environ["PADDLE_TRAINER_ID"] == "1":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        if options["how"] == "killed":
            os.kill(os.getpid(), 9)
        if options["how"] == "raises":
            raise ValueError("the culprit")
    time.sleep(60)


def run(attempt: Path, waiting: WaitingRanks | None, function=tell, limit=None, **options) -> JobEnd:
    attempt.mkdir()
    extra = {"folder": str(attempt), **options}
    job = Job(recipe=RECIPE, entry_point=f"{__name__}:{function.__name__}", extra=extra, quiet=True)
    plan = LaunchPlan(job=job, machine=Machine.here(), ranks=2)
    variables = environment(plan, os.environ)
    ends = replace(ExternalEvents(signals=Signals()), **({"must_end": limit} if limit else {}))
    return supervise(plan, attempt, argv(plan, attempt), variables, ends, prepared=waiting)[0]


@pytest.fixture(scope="module")
def waiting():
    with WaitingRanks() as made:
        yield made
        pids = [each.pid for each in made._waiting]
    assert pids and not any(alive(pid) for pid in pids)


@pytest.mark.long
def test_a_fork_is_what_the_launcher_starts(waiting, tmp_path, monkeypatch):
    assert run(tmp_path / "before", waiting) == JobEnd()
    pids = [each.pid for each in waiting._waiting]
    monkeypatch.setenv("PADDLE_DP_OF_A_JOB", "new")
    forks, started = (tmp_path / "forks", waiting), (tmp_path / "started", None)
    found = []
    for attempt, these in (forks, started):
        assert run(attempt, these) == JobEnd()
        assert "a rank's own words" in (attempt / "workerlog.1").read_text()
        found.append([json.loads((attempt / f"told.{rank}").read_text()) for rank in range(2)])
    drawn = [number for side in found for rank in side for number in rank["drawn"]]
    # Who seeds nothing draws other numbers on each rank, and orders sets otherwise.
    assert len(set(drawn)) == 16
    for side in found:
        for rank in side:
            rank["same"]["arguments"] = [word.rpartition("/")[2] for word in rank["same"]["arguments"]]
            rank["same"]["environment"].pop("PADDLE_DP_OPTIONS")  # the attempt's folder is in it
    assert [rank["same"] for rank in found[0]] == [rank["same"] for rank in found[1]]
    assert [each.pid for each in waiting._waiting] == pids


@pytest.mark.long
@pytest.mark.parametrize(("how", "kind"), [("killed", "SIGKILL"), ("raises", "ValueError"), ("stuck", None)])
def test_a_job_that_ends_badly_takes_nothing_with_it(waiting, tmp_path, how, kind):
    run(tmp_path / "before", waiting)
    pids = [each.pid for each in waiting._waiting]
    end = time.monotonic() + 5
    found = run(
        tmp_path / "bad", waiting, misbehave, how=how, limit=lambda: how == "stuck" and time.monotonic() > end
    )
    if kind:
        assert found.cause is not None
        assert (found.cause.rank, found.cause.kind) == (1, kind)
    # Not even what rank 1 has started in a session of its own.
    assert not any(descendants(pid) for pid in pids)
    assert run(tmp_path / "after", waiting) == JobEnd()
    assert [each.pid for each in waiting._waiting] == pids


@pytest.mark.long
def test_a_waiting_process_that_is_killed_ends_its_rank_alone_and_is_replaced(waiting, tmp_path):
    run(tmp_path / "before", waiting)
    victim = waiting._waiting[1].pid
    begun = time.monotonic()

    def look() -> bool:
        if time.monotonic() > begun + 3 and alive(victim):
            os.kill(victim, 9)
        return False

    found = run(tmp_path / "bad", waiting, misbehave, how="stuck", limit=look)
    assert found.cause is not None and found.cause.rank == 1
    assert run(tmp_path / "after", waiting) == JobEnd()
    assert waiting._waiting[1].pid != victim


@pytest.mark.long
def test_a_waiting_process_that_is_stopped_does_not_keep_the_job(waiting, tmp_path):
    """The job waited for its answer for ever, without a word, when all was done."""
    run(tmp_path / "before", waiting)
    for each in waiting._waiting:
        os.kill(each.pid, signal.SIGSTOP)
    assert run(tmp_path / "after", waiting) == JobEnd()


@pytest.mark.processes
def test_an_answer_is_awaited_for_a_limited_time(monkeypatch):
    command = ["sh", "-c", "read line; echo 7; exec sleep 60"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(process.pid), 5)
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert _answer(process) == 7  # it was continued
        monkeypatch.setattr("paddle_dp.launch.prepared_ranks.ANSWER", 0.3)
        assert _answer(process) == 0
        assert process.wait(5) == -signal.SIGKILL


@pytest.mark.long
def test_ranks_that_are_needed_early_import_at_once(tmp_path):
    """A rank that was killed in a job's first seconds waited for the end of the spares' delay."""
    plan = LaunchPlan(job=Job(recipe=RECIPE, entry_point=f"{__name__}:tell"), machine=Machine.here(), ranks=2)
    with WaitingRanks() as spares:
        spares.start(plan, environment(plan, os.environ), 600.0)
        pids = [each.pid for each in spares._waiting]
        assert run(tmp_path / "early", spares) == JobEnd()
        assert [each.pid for each in spares._waiting] == pids


@pytest.mark.parametrize("changed", [{"devices": ("0",)}, {"nodes": 2}])
def test_ranks_on_devices_and_on_several_nodes_are_started(changed, tmp_path):
    plan = LaunchPlan(job=Job(recipe=RECIPE), machine=Machine(cores=2), ranks=2, **changed)
    assert WaitingRanks().begin(plan, {}, tmp_path) is None


def test_ranks_are_told_what_the_launcher_tells_them(tmp_path):
    one, other = launched(2, {"PORT_RANGE": "61001:61009"}, tmp_path)
    ports = [int(each.rpartition(":")[2]) for each in one["PADDLE_TRAINER_ENDPOINTS"].split(",")]
    assert one["PADDLE_TRAINER_ENDPOINTS"] == other["PADDLE_TRAINER_ENDPOINTS"]
    assert len({*ports, int(one["PADDLE_MASTER"].rpartition(":")[2])}) == 3
    assert (one["PADDLE_TRAINER_ID"], other["PADDLE_TRAINER_ID"]) == ("0", "1")


def test_a_block_without_enough_free_ports_is_left_for_others(tmp_path):
    """It ended `paddle-dp verify` with the exit status of a difference."""
    one, _ = launched(2, {"PORT_RANGE": "61001:61002"}, tmp_path)
    ends = [one["PADDLE_MASTER"], *one["PADDLE_TRAINER_ENDPOINTS"].split(",")]
    assert len({int(end.rpartition(":")[2]) for end in ends} - {61001, 61002}) == 3


PLAN = LaunchPlan(job=Job(recipe=Path("r.yaml"), ranks=2), machine=Machine(cores=2), ranks=2)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of the launcher: writes the line that it is given, and its environment."""
    file = tmp_path / "program.py"
    file.write_text(
        "import os, sys\n"
        f"line = sys.stdin.readline(); open({str(tmp_path / 'line')!r}, 'w').write(line + repr(dict(os.environ)))\n"
    )
    monkeypatch.setattr("paddle_dp.launch.prepared_ranks.LAUNCHER_PROGRAM", file)
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
        assert ahead.begin(PLAN, given(), tmp_path) is None  # this job has no restarts
    said = (tmp_path / "line").read_text()
    assert '"--nproc_per_node", "2"' in said and str(tmp_path / "launcher.log") in said
    assert "hush" not in said and "PADDLE_DP_JOB" in said


@pytest.mark.processes
def test_each_restart_has_one_that_is_no_part_of_the_attempt_before(program: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, job=replace(PLAN.job, restarts=2))
    with PreparedLauncher(plan, os.environ) as ahead:
        for attempt in ("1-2", "1-3", "1-4"):
            waiting = ahead._launcher
            assert waiting is not None and "PADDLE_DP_JOB" not in environ_of(waiting.pid)
            waiting.send_signal(signal.SIGSTOP)  # it would never begin
            launcher = ahead.begin(plan, given(PADDLE_DP_JOB=attempt), tmp_path)
            assert launcher is waiting and launcher.wait() == 0
            assert f'"PADDLE_DP_JOB": "{attempt}"' in (tmp_path / "line").read_text()
        last = ahead._launcher
    assert last is not None and not alive(last.pid)


@pytest.mark.processes
def test_a_launcher_that_cannot_be_started_ahead_ends_no_attempt(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, job=replace(PLAN.job, restarts=2))
    with PreparedLauncher(plan, os.environ) as ahead:
        monkeypatch.setattr("paddle_dp.launch.prepared_ranks.Launcher", no_process)
        launcher = ahead.begin(plan, given(), tmp_path)
        assert launcher is not None and launcher.wait() == 0
        assert ahead.begin(plan, given(), tmp_path) is None  # a new one is started


def no_process(*args: Any, **options: Any) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.processes
def test_no_launcher_waits_that_would_miss_a_returned_device(program: Path, tmp_path: Path) -> None:
    job = replace(PLAN.job, restarts=2, least_ranks=1)
    plan = replace(PLAN, job=job, devices=("0", "1"))
    with PreparedLauncher(plan, os.environ) as ahead:
        launcher = ahead.begin(plan, environment(plan, os.environ), tmp_path)
        assert launcher is not None and launcher.wait() == 0
        assert ahead._launcher is None


@pytest.mark.processes
def test_a_fork_of_a_killed_launcher_is_not_left(program: Path, tmp_path: Path) -> None:
    file = tmp_path / "fork"
    program.write_text(
        "import os, sys, time\nsys.stdin.readline()\n"
        f"if os.fork(): open({str(file)!r}, 'w').close()\ntime.sleep(60)\n"
    )
    with PreparedLauncher(PLAN, os.environ) as ahead:
        launcher = ahead.begin(PLAN, given(), tmp_path)
        assert launcher is not None
        eventually(file.exists)
        launcher.kill()
        launcher.wait()
        try:
            assert launcher.left()
        finally:
            kill_all(launcher.left)


def environ_of(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_text()


@pytest.mark.processes
def test_a_job_that_needs_none_gets_no_other(program: Path, tmp_path: Path) -> None:
    plan = replace(PLAN, job=replace(PLAN.job, restarts=2))
    with PreparedLauncher(plan, os.environ) as ahead:
        ahead.drop()
        assert ahead.begin(plan, given(), tmp_path) is None and ahead._launcher is None


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
