"""A real Slurm of two nodes on this machine, and jobs on it by the script that `paddle-dp cluster slurm` prints."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from paddle_dp.launch.processes import variable
from tests.eventually import eventually
from tests.house.programs import ROOT, commands

RECIPE = "tests/faults/slow.yaml"


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Slurm's daemons and nodes in namespaces of their own, which end with `engine`."""

    folder: Path
    variables: dict[str, str]
    engine: subprocess.Popen[bytes]

    def __call__(self, *words: str | Path, status: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs a command beside the controller."""
        done = subprocess.run(
            [self.folder / "in", *map(str, words)], cwd=ROOT, env={**self.variables, **more},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def submit(self, folder: Path, *options: str, cut: str = "", slow: str = "0.1") -> SlurmJob:
        """Submits the printed script, without what the pattern `cut` matches, for two nodes of one rank each."""
        out, log, script = folder / "run", folder / "log", folder / "job.sbatch"
        words = ("paddle-dp", "cluster", "slurm", RECIPE, "--nodes", "2", "--ranks", "1", "--output-dir", out)
        text = self(*words).stdout
        assert not cut or re.search(cut, text)
        script.write_text(re.sub(cut, "", text) if cut else text)
        sent = self("sbatch", *options, f"--output={log}", script, SLOW=slow)
        return SlurmJob(slurm=self, number=sent.stdout.split()[-1], out=out, log=log, sent=time.time())

    def daemon(self, node: int) -> int:
        """The process of a node's slurmd."""
        configuration = str(self.folder / "slurm.conf")
        (pid,) = (
            pid
            for pid, command in commands().items()
            if command == f"slurmd -D -N node{node}" and variable(pid, "SLURM_CONF") == configuration
        )
        return pid

    def start_daemon(self, node: int) -> None:
        """Starts a node's slurmd once more; it ends with the engine."""
        subprocess.Popen(
            [self.folder / "in", self.folder / "node", str(node)], start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job in the queue. `sent`: time of its submission."""

    slurm: Slurm
    number: str
    out: Path
    log: Path
    sent: float

    def shown(self, key: str) -> str:
        """A value as `scontrol show job` prints it, such as the JobState."""
        text = self.slurm("scontrol", "show", "job", self.number).stdout
        return re.findall(rf"\b{key}=(\S+)", text)[0]

    def turns(self) -> int:
        """How often it was put into the queue again."""
        return int(self.shown("Restarts"))

    def screen(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def until(self, state: str, seconds: float = 300) -> None:
        """Waits for a JobState; fails with the log."""
        try:
            eventually(lambda: self.shown("JobState") == state, seconds, pause=0.5)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.shown('JobState')}\n{self.screen()}") from None

    def tasks(self) -> dict[int, int]:
        """The process of `paddle-dp` that srun has started on each node."""
        return {
            int(variable(pid, "SLURM_NODEID") or 0): pid
            for pid, command in commands().items()
            if "-m paddle_dp train" in command
            and str(self.out) in command
            and _name_of_parent(pid) == "slurmstepd"
        }

    def processes(self) -> list[int]:
        """All that is left of the job, or is at work for it."""
        return [pid for pid, command in commands().items() if str(self.out) in command]


def _name_of_parent(pid: int) -> str:
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:
        return ""


@contextmanager
def started(folder: Path) -> Iterator[Slurm]:
    """Starts the daemons in a folder, and ends them with all their jobs."""
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
            env={**os.environ, "KILL_WAIT": "60", "GRACE": "120"},  # seconds: of a busy machine
        )
    try:
        eventually((folder / "engine" / "up").exists, 120, pause=0.2)
        yield Slurm(folder=folder / "engine", variables=variables, engine=engine)
    finally:
        engine.send_signal(signal.SIGKILL)  # unshare ignores SIGTERM; all of Slurm is tied to it
        engine.wait()
