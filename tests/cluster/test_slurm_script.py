"""The script for Slurm: what it asks for, and what it does where Slurm's programs are played."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from paddle_dp.cluster.request import ClusterRequest
from paddle_dp.cluster.slurm import slurm
from paddle_dp.errors import UsageError
from tests.house.programs import run_program

REQUEST = ClusterRequest(
    recipe=Path("r.yaml"), settings=("name=it's a run",), name="r", nodes=4, gpus=8, memory="16Gi"
)
AGAIN, END = "is requeued", "is over"


def options(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.M))


@pytest.mark.parametrize(
    ("more", "cpus"), [({"gpus": 0}, "1"), ({"gpus": 0, "ranks": 2}, "2"), ({}, "32"), ({"cpus": 6}, "6")]
)
def test_it_asks_for_processors_that_small_nodes_have(more: dict[str, int], cpus: str) -> None:
    assert options(slurm(replace(REQUEST, **more), ""))["cpus-per-task"] == cpus  # type: ignore[arg-type]


def test_restarts_are_refused_for_srun_starts_no_task_again() -> None:
    with pytest.raises(
        UsageError, match=r"--restarts 3: under Slurm leave it out\. .* requeues the whole job"
    ):
        slurm(replace(REQUEST, restarts=3), "")


def test_without_the_command_it_says_where_to_load_it(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(slurm(replace(REQUEST, folder=str(tmp_path)), ""))
    path = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "1"}
    ended = run_program("bash", tmp_path / "job.sbatch", env=path, status=2)
    assert "paddle-dp is not on the PATH" in ended.stderr and "activate its environment" in ended.stderr


def test_the_home_folder_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """bash leaves a ~ in quotes, so each turn looked for checkpoints in a folder of that name, and began anew."""
    monkeypatch.setenv("HOME", "/home/me")
    assert "\nout='/home/me/a run'\n" in slurm(replace(REQUEST, folder="~/a run"), "")


def test_it_asks_for_the_nodes_and_a_signal_before_the_limit() -> None:
    asked = options(slurm(REQUEST, "by a test"))
    assert (asked["nodes"], asked["ntasks-per-node"], asked["gpus-per-node"]) == ("4", "1", "8")
    assert (asked["signal"], asked["mem"], asked["open-mode"]) == ("USR1@120", "16G", "append")
    assert "requeue" in asked
    short = ClusterRequest(recipe=Path("r.yaml"), name="r", time="00:02:00")
    assert options(slurm(short, ""))["signal"] == "USR1@30"  # 30 to 90 s after the begin
    assert not {"gpus-per-node", "mem"} & options(slurm(short, "")).keys()  # the cluster's default
    assert ClusterRequest(recipe=Path("r"), name="r", time="1-02:00:30").seconds == 26 * 3600 + 30


@pytest.mark.processes
@pytest.mark.parametrize(
    ("status", "saved", "saves", "turn", "ending"),
    [
        (75, True, False, 1, AGAIN), (75, False, True, 1, AGAIN), (75, True, True, 100, "it had 100 turns"),
        (75, False, True, 0, "Requeue=0"), (1, True, True, 1, AGAIN), (1, True, True, 0, "Requeue=0"),
        (1, True, False, 1, END), (137, False, True, 1, AGAIN), (137, False, False, 1, END),
        (138, True, False, 1, AGAIN), (138, False, False, 1, END), (2, True, True, 1, END),
        (0, False, True, 1, END),
    ],
)  # fmt: skip
def test_it_is_requeued_where_there_is_something_to_go_on_from(
    tmp_path: Path, status: int, saved: bool, saves: bool, turn: int, ending: str
) -> None:
    """After a stop, and after a lost task or the time limit's signal with a checkpoint."""
    said, out, programs = tmp_path / "said", tmp_path / "a run", tmp_path / "bin"
    newer = f'mkdir -p "{out}/checkpoints/step-00000009"; ' if saves else ""
    programs.mkdir()
    for name, text in {
        "scontrol": f'[ "$1" = show ] && echo "   Requeue=$REQUEUE Restarts=1" || echo "$@" >> {said}',
        "srun": f'"$@"; {newer}exit {status}',
        "paddle-dp": f'printf "%s|" "$@" >> {said}; echo >> {said}',
    }.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (programs / name).chmod(0o755)
    if saved:
        (out / "checkpoints" / "step-00000004").mkdir(parents=True)
    (tmp_path / "job.sbatch").write_text(slurm(replace(REQUEST, folder=str(out)), "by a test"))
    variables = {
        "SLURM_JOB_ID": "42",
        "SLURM_RESTART_COUNT": str(turn),
        "REQUEUE": "0" if ending == "Requeue=0" else "1",
    }
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    words = ("bash", tmp_path / "job.sbatch", "train.batch=64")
    screen = run_program(*words, env={**variables, **path}, timeout=20, status=status).stderr
    lines = said.read_text().splitlines()
    resume = "--resume|" if saved else ""
    given = "train|r.yaml|name=it's a run|--ranks|8|train.batch=64"
    assert lines[0] == f"{given}|--nodes|auto|--output-dir|{out}|{resume}"
    assert lines[1:] == (["requeue 42"] if ending == AGAIN else [])
    sentence = "job 42 is not put into the queue again: "
    assert (sentence in screen) == (ending not in (AGAIN, END))
    assert ending in (AGAIN, END) or f"{sentence}{ending}" in screen
