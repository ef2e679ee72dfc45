"""The examination as a whole: its ranks, its screen, its status, its time."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.doctor import examine as examination
from paddle_dp.doctor.examine import examine, judged
from paddle_dp.doctor.machine import DoctorCheck
from paddle_dp.doctor.rank import exchange as exchanged
from paddle_dp.doctor.rank import first_sum
from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Job, LaunchPlan
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.supervisor import JobEnd
from tests.ranks import run_ranks

SEEN: dict[str, Any] = {
    "ranks": 4, "device": "gpu:0", "library": "NCCL 22703", "seconds": 2e-4, "hosts": ["a", "a", "b", "b"], "wrong": [],
    "skews": [0.0, 0.0, -0.002, -0.003],
}  # fmt: skip


def plan(ranks: int = 2, nodes: int = 1) -> LaunchPlan:
    return LaunchPlan(job=Job(ranks=ranks), machine=Machine(cores=2), ranks=ranks, nodes=nodes)


def summed(first: str) -> dict[str, Any]:
    return exchanged("cpu", Path(first))


def test_ranks_add_up_and_compare_their_clocks(tmp_path: Path) -> None:
    first, second = run_ranks(summed, 2, str(tmp_path / "summed"))
    assert (tmp_path / "summed").exists()
    assert first["hosts"] == second["hosts"] and len(first["hosts"]) == 2
    assert (first["ranks"], first["library"], first["wrong"]) == (2, "gloo", [])
    assert first["skews"][0] == 0 and abs(first["skews"][1]) < 0.5 and 0 < first["seconds"] < 5


def test_what_a_rank_saw_in_words() -> None:
    found, clocks = judged(SEEN, plan(nodes=2), 6.0)
    assert (
        found.found == "4 ranks on 2 nodes by NCCL 22703 on gpu:0: 1 MB summed in 0.2 ms, after 6.0 s in all"
    )
    assert (clocks.state, clocks.found) == ("ok", "node 1 (b) is -0.003 s from node 0 (a), the farthest")
    equal = judged({**SEEN, "skews": [0.0, 0.0004, 0.0, 0.0]}, plan(nodes=2), 6.0)[1]
    assert equal.found == "all nodes agree"
    late = judged({**SEEN, "skews": [0.0, 0.0, 5.0, 5.1]}, plan(nodes=2), 6.0)[1]
    assert late.state == "look" and "node 1 (b) is +5.100 s" in late.found
    (wrong,) = judged({**SEEN, "wrong": [2]}, plan(), 6.0)
    assert (wrong.state, wrong.found) == ("mend", "wrong sums on rank 2 (b)")


def test_ranks_that_failed_after_a_sum_are_not_said_to_have_exchanged_nothing(tmp_path: Path) -> None:
    cause = Failure(rank=1, kind="left", message="left with exit status 86", exit_status=86)
    job_end = JobEnd(status=86, cause=cause)
    assert examination._failed(plan(), job_end, tmp_path).found == "2 ranks could not exchange anything"
    first_sum(tmp_path).touch()
    found = examination._failed(plan(), job_end, tmp_path)
    assert (found.state, found.found) == ("mend", "2 ranks added up numbers, and failed later")
    assert "left with exit status 86" in found.todo


@pytest.fixture
def _quick_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        examination, "exchange", lambda plan: [DoctorCheck("exchange", f"{plan.ranks} ranks")]
    )


@pytest.mark.usefixtures("_quick_exchange")
def test_the_screen_and_the_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert examine(Job(ranks=2, output_dir=tmp_path, master="ignored:1")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ok    paddle        Paddle ") and max(map(len, lines)) <= 80
    assert lines[-2] == "ok    exchange      2 ranks" and lines[-1].startswith("ready")


@pytest.mark.usefixtures("_quick_exchange")
def test_what_has_to_be_mended_is_status_1_and_no_rank_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none9")
    assert examine(Job(ranks=2, output_dir=tmp_path), as_json=True) == 1
    told = json.loads(capsys.readouterr().out)
    states = {each["name"]: each["state"] for each in told["findings"]}
    assert not told["ok"] and states["interface"] == "mend"
    assert told["findings"][-1] == {
        "name": "exchange", "found": "not tried", "state": "look", "todo": "Mend the others first.",
    }  # fmt: skip


def test_what_contradicts_itself_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="--nodes 2 needs --master"):
        examine(Job(ranks=2, nodes=2))


@pytest.mark.long
@pytest.mark.processes
def test_the_whole_of_it_takes_seconds(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "paddle_dp", "doctor", "--out", str(tmp_path), "--json"]
    began = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    seconds = time.monotonic() - began
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"], done.stderr) == (0, True, "")
    assert "2 ranks by gloo on cpu" in told["findings"][-1]["found"]
    assert seconds < 10 * max(1.0, os.getloadavg()[0] / 2), seconds
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("raise ValueError('this machine is ill')", "rank 1 of 2 on .*: ValueError: this machine is ill"),
        ("time.sleep(100)", "no rank has made progress for 12 s .*: rank 1 has been in start"),
        ("print('I leave'); os._exit(7)", "rank 1 of 2 on .*: left with exit status 7 .*\nI leave"),
    ],
)
def test_ranks_that_cannot_exchange_are_told_with_the_cause(
    wrong: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = examination.RANK.read_text().replace(
        "sys.path.append", f"sys.path.append({os.getcwd()!r}); sys.path.append"
    )
    call, fault = "        report_fields = exchange(device, first)\n", f"        if here.rank == 1: {wrong}\n"
    assert call in text
    (tmp_path / "rank.py").write_text(text.replace(call, fault + call))
    monkeypatch.setattr(examination, "RANK", tmp_path / "rank.py")
    monkeypatch.setattr(examination, "ALONE", 12.0)
    (found,) = examination.exchange(plan())
    assert found.state == "mend" and found.found == "2 ranks could not exchange anything"
    assert re.match(said, found.todo), found.todo
