"""A real Slurm of two nodes on this machine: one job learns one process's numbers, and goes on after its time limit.

`pytest -m slurm`, after `apt-get install slurmctld slurmd slurm-client munge iproute2`. Each node has a separate
network; nothing outside of new namespaces is touched.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.eventually import eventually
from tests.faults.slow_run import are_right, losses, newest, right_weights
from tests.house.programs import ROOT

Run = Callable[..., subprocess.CompletedProcess[str]]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "nsenter")
LACKING = [name for name in PROGRAMS if not shutil.which(name)]
RECIPE = "tests/faults/slow.yaml"
pytestmark = [
    pytest.mark.long, pytest.mark.slurm, pytest.mark.processes, pytest.mark.timeout(900),
    pytest.mark.skipif(bool(LACKING), reason=f"no Slurm here: {', '.join(LACKING)} is missing"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may make the nodes' networks"),
]  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a command beside the controller."""
    folder = tmp_path_factory.mktemp("slurm")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "paddle-dp").write_text(f'#!/bin/sh\nexec {sys.executable} -m paddle_dp "$@"\n')
    (programs / "paddle-dp").chmod(0o755)
    variables = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    with (folder / "up.log").open("w") as log:
        engine = subprocess.Popen(
            [Path(__file__).with_name("slurm_up.sh"), folder / "engine"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def run(*words: str | Path, status: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [folder / "engine" / "in", *map(str, words)], cwd=ROOT, env={**variables, **more}, capture_output=True,
            text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    try:
        eventually((folder / "engine" / "up").exists, 120, pause=0.2)
        yield run
    finally:
        engine.send_signal(signal.SIGKILL)  # unshare ignores SIGTERM; all of Slurm is tied to it
        engine.wait()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The weights of one machine's two ranks."""
    return right_weights(tmp_path_factory.mktemp("right"), 2)


def test_two_nodes_are_one_job(slurm: Run, right: dict[str, np.ndarray], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ("srun", "-N2", "--ntasks-per-node=1", "paddle-dp", "train", RECIPE, "--ranks", "1")
    refused = slurm(*words, "--output-dir", out, status=2).stderr
    assert "Slurm has started this command on 2 nodes, and each would work alone" in refused
    assert not out.exists()
    slurm(*words, "--nodes", "auto", "--output-dir", out, SLOW="0")
    assert len(losses(out)) == 300
    assert are_right(out, right) == 0.0


def test_a_job_goes_on_after_its_time_limit(slurm: Run, right: dict[str, np.ndarray], tmp_path: Path) -> None:
    """SIGUSR1 before the limit, a checkpoint, status 75, requeue, --resume: three turns, and the bits of one."""
    out, log = tmp_path / "run", tmp_path / "log"
    limits = ("--time=00:02:00", "--signal=USR1@30", "--cpus-per-task=1")  # 90 s after the begin
    script = tmp_path / "job.sbatch"
    words = ("--nodes", "2", "--ranks", "1", "--output-dir", out)
    script.write_text(slurm("paddle-dp", "cluster", "slurm", RECIPE, *words).stdout)
    sent = slurm("sbatch", *limits, f"--output={log}", script, SLOW="0.5")
    job = sent.stdout.split()[-1]

    def state() -> tuple[str, int]:
        shown = slurm("scontrol", "show", "job", job).stdout
        (name,), (turns,) = (re.findall(rf"{key}=(\w+)", shown) for key in ("JobState", "Restarts"))
        assert name in ("PENDING", "RUNNING", "COMPLETING", "COMPLETED"), log.read_text()
        return name, int(turns)

    eventually(lambda: state()[1] == 1, 200, pause=1)
    first = newest(out)
    assert 0 < first < 300
    eventually(lambda: newest(out) > first, 200, pause=1)
    slurm("scancel", "--signal=USR1", job)  # as at the limit, and sooner
    eventually(lambda: state()[1] == 2, 200, pause=1)
    eventually(lambda: state()[0] == "COMPLETED", 300, pause=1)
    stopping = "SIGUSR1: stopping after one of the next updates, with a checkpoint"
    assert log.read_text().count(stopping) >= 2
    assert newest(out) == 300
    assert are_right(out, right) == 0.0
