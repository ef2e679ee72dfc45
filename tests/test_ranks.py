"""The instrument of all parity tests: it must carry results, name the first failure, and leave nothing running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from paddle_dp.launch.processes import alive
from tests import rank_pool
from tests.eventually import eventually
from tests.house.command_service import command_line
from tests.rank_pool import children
from tests.ranks import ROOT, run_ranks


def join_and_add(number):
    import paddle

    paddle.distributed.init_parallel_env()
    total = paddle.to_tensor([float(number + paddle.distributed.get_rank())])
    paddle.distributed.all_reduce(total)
    return {"total": total.numpy(), "pid": os.getpid()}


def where_am_i():
    return [os.environ.get("PADDLE_TRAINER_ID"), os.environ["OMP_NUM_THREADS"], os.environ.get("MARK")]


def raise_in_rank_1():
    if os.environ["PADDLE_TRAINER_ID"] == "1":
        raise ValueError("the culprit")
    time.sleep(60)


def hang():
    time.sleep(60)


def test_ranks_meet_and_answer_in_order():
    answers = run_ranks(join_and_add, 2, number=10)
    assert [answer["total"] for answer in answers] == [[21.0], [21.0]]
    assert all(not alive(answer["pid"]) for answer in answers)


# The launcher's alone: a name, and where its own files are. And what pytest says to all that it starts.
NOT_COMPARED = ("POD_NAME", "PADDLE_BACKUP_ENV_PATH", "PADDLE_LOG_DIR", "PYTEST_CURRENT_TEST")


def surroundings():
    """What a rank was started with, its ports' numbers apart, and what it has done so far."""
    import random

    import numpy as np
    import paddle

    told = {name: value for name, value in os.environ.items() if name not in NOT_COMPARED}
    endpoints, rank = told["PADDLE_TRAINER_ENDPOINTS"].split(","), int(told["PADDLE_TRAINER_ID"])
    return {
        "environment": {name: re.sub(r"\d{4,}", "PORT", value) for name, value in told.items()},
        "endpoint is its own": endpoints[rank] == told["PADDLE_CURRENT_ENDPOINT"],
        "session is its own": os.getsid(0) == os.getpid(),
        "folder": os.getcwd(),
        "threads": len(os.listdir("/proc/self/task")),
        "joined": paddle.distributed.is_initialized(),
        "drawn": [random.random(), np.random.rand(), paddle.rand([1]).item()],
    }


def test_a_fork_is_what_the_launcher_starts(monkeypatch):
    run_ranks(where_am_i, 1)  # the waiting process is there before the variables change
    monkeypatch.setenv("NEW_VARIABLE", "here")
    monkeypatch.delenv("HOME")
    forks, started = run_ranks(surroundings, 2), run_ranks(surroundings, 2, fresh=True)
    drawn = [number for rank in (*forks, *started) for number in rank.pop("drawn")]
    assert len(set(drawn)) == 12  # who seeds nothing draws other numbers on each rank
    assert forks == started


def test_one_rank_is_a_plain_process():
    assert run_ranks(where_am_i, 1, env={"MARK": "here"}) == [[None, "1", "here"]]


def test_a_failure_is_the_culprits_own_traceback():
    begun = time.monotonic()
    with pytest.raises(AssertionError, match="the culprit") as caught:
        run_ranks(raise_in_rank_1, 2)
    assert "raise_in_rank_1" in str(caught.value)
    assert time.monotonic() - begun < 40


def test_ranks_that_hang_are_ended():
    with pytest.raises(TimeoutError, match="did not answer within 1 s"):
        run_ranks(hang, 1, timeout=1)


def test_a_function_that_a_rank_could_not_find_is_said():
    with pytest.raises(ValueError, match=r"tests.test_ranks.*<lambda>: move it to the top of its module"):
        run_ranks(lambda: None, 1)


def test_a_command_of_the_service_is_the_command(tmp_path):
    """The same output on both screens, the same exit status, in the folder and with the variables of its caller."""
    (tmp_path / "mine.py").write_text("def Net():\n    import paddle\n    return paddle.nn.Linear(64, 10)\n")
    recipe = (ROOT / "configs/digits_mlp.yaml").read_text()
    (tmp_path / "own.yaml").write_text(re.sub("(?m)^model:.*", "model: {use: mine.Net}", recipe))
    here, service = [sys.executable, "-m", "paddle_dp"], command_line()
    for real, forked, words in (
        (here, service, ["check", "own.yaml", "--ranks", "2"]),
        (here, service, ["check", "own.yaml", "train.bacth=3"]),
        (here, service, []),
        ([sys.executable], [*service, "python"], ["-c", "import sys; sys.exit('no such thing')"]),
    ):
        ends = [
            subprocess.run(
                [*command, *words],
                cwd=tmp_path,
                env={**os.environ, "COLUMNS": "70"},
                capture_output=True,
                text=True,
            )
            for command in (real, forked)
        ]
        wanted, had = [(end.returncode, end.stdout, end.stderr) for end in ends]
        assert had == wanted and any(wanted[1:])


def test_a_command_whose_caller_is_gone_ends(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, time\nopen('pid.new', 'w').write(str(os.getpid()))\nos.rename('pid.new', 'pid')\ntime.sleep(100)\n"
    )
    (tmp_path / "own.yaml").write_text("model: {use: mine.Net}\n")
    caller = subprocess.Popen([*command_line(), "check", "own.yaml"], cwd=tmp_path)
    eventually((tmp_path / "pid").exists, 60)
    caller.kill()
    caller.wait()
    eventually(lambda: not alive(int((tmp_path / "pid").read_text())), 20)


def test_a_zombie_of_a_pool_is_no_child_of_a_test_and_a_zombie_of_a_test_is(monkeypatch):
    """A pool waits for its forks when it can: one that had just ended failed the test at work."""
    leave = "import os, sys; pid = os.fork(); pid or os._exit(0); print(pid, flush=True); sys.stdin.read()"
    before = children()
    with subprocess.Popen(
        [sys.executable, "-c", leave], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        zombie = int(parent.stdout.readline())
        eventually(lambda: psutil.Process(zombie).status() == psutil.STATUS_ZOMBIE)
        assert {child.pid for child in children()} - {child.pid for child in before} == {parent.pid, zombie}
        pool = SimpleNamespace(process=parent)
        monkeypatch.setitem(rank_pool._pools, (("a test's", "pool"),), pool)
        assert children() == before
