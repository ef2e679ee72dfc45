"""Real supervisors with real ranks, and a check after each test that none of their processes is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.launch.processes import alive, descendants, kill_all, marked

ROOT = Path(__file__).resolve().parent.parent.parent
MARK = "PADDLE_DP_TEST"  # reaches every process of a test's job


@dataclass
class Started:
    """A supervisor, its run folder, and what its ranks leave behind."""

    process: subprocess.Popen[str]
    out: Path
    pids: Path
    mark: str

    def rank_pids(self, ranks: int, timeout: float = 60) -> list[int]:
        """The ranks' pids, once all of them are at work."""
        end = time.monotonic() + timeout
        names = [self.pids / str(rank) for rank in range(ranks)]
        while not all(name.exists() for name in names):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end, "the ranks did not come"
            time.sleep(0.02)
        return [int(name.read_text()) for name in names]

    def finish(self, timeout: float = 60) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        said, complained = self.process.communicate(timeout=timeout)
        return self.process.returncode, said, complained

    def left(self) -> list[int]:
        """The processes of this job that still run."""
        return marked(MARK, self.mark)

    def gone_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.left() and time.monotonic() < end:
            time.sleep(0.02)
        return not self.left()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """start(task, ranks=2, env={}, fault=…, **job): a supervisor at work on "train" or on tests.faults.entry_points."""
    jobs: list[Started] = []

    def begin(
        entry_point: str, ranks: int | None = 2, env: dict[str, str] | None = None, **job: Any
    ) -> Started:
        folder = tmp_path / f"job{len(jobs)}"
        (folder / "pids").mkdir(parents=True)
        extra = {"pids": str(folder / "pids"), **job.pop("extra", {})}
        named = {
            "recipe": "tests/faults/tiny.yaml",
            "entry_point": entry_point
            if entry_point == "train"
            else f"tests.faults.entry_points:{entry_point}",
            "output_dir": str(folder / "run"),
        }
        words = {**named, "ranks": ranks, **job, "extra": extra}
        mark = f"{os.getpid()}-{time.time_ns()}"
        command = [sys.executable, "tests/faults/start.py", json.dumps(words)]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(env or {}), MARK: mark}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        jobs.append(Started(process, Path(words["output_dir"]), folder / "pids", mark))
        return jobs[-1]

    yield begin
    left = [pid for job in jobs for pid in job.left()]
    for job in jobs:
        kill_all(
            lambda job=job: [*descendants(job.process.pid), *filter(alive, [job.process.pid]), *job.left()]
        )
        job.process.wait()
        job.process.stdout.close()
        job.process.stderr.close()
    assert not left, "processes were left behind"
