"""A rank under Paddle's own launcher, without a supervisor: the documented command, its words and its failures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.launch.processes import alive, descendants, kill_all
from paddle_dp.launch.recipe_rank import ENTRY_POINTS, _find, _read, guarded
from tests.eventually import eventually

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = "tests/faults/tiny.yaml"


def launch(tmp_path: Path, entry_point: str, *words: str) -> subprocess.Popen[str]:
    """`python -m paddle.distributed.launch --nproc_per_node 2 tools/train.py -c …`, as the README says it."""
    script = [
        "tools/train.py",
        "-c",
        TINY,
        "--entry-point",
        f"tests.faults.entry_points:{entry_point}",
        "--out",
        str(tmp_path / "run"),
    ]
    options = ["--nproc_per_node", "2", "--log_dir", str(tmp_path / "log")]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    return subprocess.Popen(
        [sys.executable, "-m", "paddle.distributed.launch", *options, *script, *words], cwd=ROOT, text=True,
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


def test_the_documented_command_does_the_task(tmp_path):
    process = launch(
        tmp_path, "say", "-o", "train.batch=32 per rank", "train.seed=1", "-o", "train.micro_batches=2"
    )
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 0, said
    assert "2 ranks on CPU · 1 thread each" in said and "rank 0 of 2 says 3" in said
    assert said.count("train.batch is 64: 32 × 2 data ranks") == 1


def test_a_failing_rank_leaves_its_failure_beside_the_logs(tmp_path):
    process = launch(tmp_path, "raise_while_others_sleep")
    said, _ = process.communicate(timeout=90)
    assert process.returncode != 0, said
    assert (
        json.loads((tmp_path / "log" / "failure.rank-1.json").read_text())["message"]
        == "the culprit's own words"
    )


def test_ranks_die_with_a_launcher_that_is_killed(tmp_path):
    process = launch(tmp_path, "say_and_wait")
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
