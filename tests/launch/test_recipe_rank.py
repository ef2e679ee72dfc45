"""A rank under Paddle's own launcher, without a supervisor: the documented command, its words and its failures."""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.launch.processes import alive, descendants, kill_all
from paddle_dp.launch.recipe_rank import ENTRY_POINTS, _find, _read, guarded
from tests.eventually import eventually
from tests.faults.entry_points import say
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = "tests/faults/tiny.yaml"
PR_GET_PDEATHSIG = 2


def script(tmp_path: Path, entry_point: str) -> list[str]:
    return ["tools/train.py", "-c", TINY, "--entry-point", entry_point, "--out", str(tmp_path / "run")]


def launch(tmp_path: Path, entry_point: str, *words: str) -> subprocess.Popen[str]:
    """`python -m paddle.distributed.launch --nproc_per_node 2 tools/train.py -c …`, as the README says it."""
    options = ["--nproc_per_node", "2", "--log_dir", str(tmp_path / "log"), *script(tmp_path, entry_point)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "paddle.distributed.launch", *options, *words], cwd=ROOT, text=True,
        env={**kept, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_overrides_can_stand_together_and_apart():
    job = _read("train", ["-c", "r.yaml", "-o", "a=1", "b=2", "-o", "c=3", "--resume", "--out", "runs/x"])
    assert job.overrides == ("a=1", "b=2", "c=3")
    assert (job.resume, job.output_dir, job.entry_point, job.recipe) == (
        "newest",
        "runs/x",
        "train",
        Path("r.yaml"),
    )
    assert _read("train", ["-c", "r.yaml", "--resume", "a/b"]).resume == "a/b"
    assert _read("evaluate", ["-c", "r.yaml", "--checkpoint", "best"]).options["checkpoint"] == "best"


def test_every_task_is_there_or_is_a_sentence():
    assert {"train", "evaluate"} <= ENTRY_POINTS.keys()
    assert callable(_find("train")) and callable(_find("evaluate"))
    with pytest.raises(UsageError, match=r"no entry point 'trian'\. Did you mean 'train'"):
        _find("trian")


def test_a_guarded_call_leaves_its_failure(tmp_path):
    assert guarded(lambda: None, tmp_path) is None
    assert guarded(lambda: sys.exit(0), tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    failure = guarded(lambda: sys.exit(4), tmp_path)
    assert failure is not None and failure.exit_status == 4
    assert json.loads((tmp_path / "failure.rank-0.json").read_text())["exit_status"] == 4
    assert guarded(lambda: 1 / 0, None).kind == "ZeroDivisionError"


def say_and_tell(recipe: object, options: dict[str, Any]) -> None:
    """Says, besides, which signal this rank gets from the kernel when which process ends."""
    say(recipe, options)
    tied = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(tied), 0, 0, 0)
    print(f"tied to {os.getppid()} by signal {tied.value}", flush=True)


def test_the_documented_command_does_the_task(tmp_path):
    process = launch(
        tmp_path, "tests.launch.test_recipe_rank:say_and_tell",
        "-o", "train.batch=32 per rank", "train.seed=1", "-o", "train.micro_batches=2",
    )  # fmt: skip
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 0, said
    assert "2 ranks on CPU · 1 thread each" in said and "rank 0 of 2 says 3" in said
    assert said.count("train.batch is 64: 32 × 2 data ranks") == 1
    assert f"tied to {process.pid} by signal {signal.SIGKILL:d}" in said


def status_of(words: list[str], logs: str) -> int:
    """In a rank: with which status tools/train.py ends on rank 1; the logs are in this folder. Rank 0 does nothing."""
    os.environ["PADDLE_LOG_DIR"], sys.argv = logs, words
    if os.environ["PADDLE_TRAINER_ID"] == "0":
        return 0
    with pytest.raises(SystemExit) as end:
        runpy.run_path(words[0], run_name="__main__")
    return end.value.code


def test_a_failing_rank_leaves_its_failure_beside_the_logs(tmp_path):
    words = script(tmp_path, "tests.faults.entry_points:raise_alone")
    assert run_ranks(status_of, 2, words, str(tmp_path)) == [0, 1]
    failure = json.loads((tmp_path / "failure.rank-1.json").read_text())
    assert failure["message"] == "the culprit's own words"


@pytest.mark.long  # The documented command above asks the kernel whether it would do it.
def test_ranks_die_with_a_launcher_that_is_killed(tmp_path):
    process = launch(tmp_path, "tests.faults.entry_points:say_and_wait")
    logs = [tmp_path / "log" / f"workerlog.{rank}" for rank in range(2)]
    try:
        eventually(lambda: all(log.exists() and "at work" in log.read_text() for log in logs), 60)
        ranks = descendants(process.pid)
        assert len(ranks) == 2
        process.send_signal(signal.SIGKILL)
        eventually(lambda: not any(map(alive, ranks)), 2)
    finally:
        kill_all(lambda: [pid for pid in [*descendants(process.pid), process.pid] if alive(pid)])
        process.communicate()
