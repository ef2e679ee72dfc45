"""Jobs of this process, one after the other, whose ranks are forks of processes that wait (as with --spares).

A start costs seconds of each process, for importing Paddle, and so does a restart: of sixty deeds, most of the time.
All else is as on the command line: the plan, the checks, the supervision, the screen. As a program it answers each line
of stdin, a job as JSON and the files for its screen, with a line that holds the exit status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = os.getcwd()

from paddle_dp.launch.processes import child_options, descendants
from tests.eventually import eventually

ROOT = Path(__file__).resolve().parent.parent.parent


class Lane:
    """The program of this file, in a `with`; `temporary` is the TMPDIR of all its processes."""

    def __init__(self, temporary: Path):
        self.temporary = temporary
        temporary.mkdir(exist_ok=True)
        self.process: subprocess.Popen[str] | None = None
        self.job: LaneJob | None = None  # the last one

    def start(self, folder: Path, words: Mapping[str, Any], env: Mapping[str, str]) -> LaneJob:
        """Starts a job with these fields; only variables PADDLE_DP_… may differ between jobs."""
        if self.job is not None and not self.job.ended:  # of a row that failed
            self.close()
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-u", __file__], cwd=ROOT, env={**os.environ, "TMPDIR": str(self.temporary)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **child_options(),
            )  # fmt: skip
        screens = [str(folder / name) for name in ("stdout", "stderr")]
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([dict(words), screens, dict(env)]) + "\n")
        self.process.stdin.flush()
        self.job = LaneJob(self.process, Path(words["output_dir"]), folder)
        return self.job

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@dataclass
class LaneJob:
    """A job in a lane, whose process is its `paddle-dp`."""

    process: subprocess.Popen[str]
    out: Path
    folder: Path
    ended: bool = False

    def screen(self) -> tuple[str, str]:
        files = [self.folder / name for name in ("stdout", "stderr")]
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in files)
        return out, err

    def finish(self, timeout: float) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        import select

        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout)
        if not ready:
            screen = self.screen()
            self.process.kill()
            raise AssertionError(f"the job has not ended within {timeout:g} s: {screen}")
        answer, self.ended = self.process.stdout.readline(), True
        return (int(answer) if answer else self.process.wait(), *self.screen())

    def left(self) -> list[int]:
        """The processes of this job that still run: those below the waiting ones."""
        return [pid for waiting in waiting_ranks(self.process.pid) for pid in descendants(waiting)]

    def gone_within(self, seconds: float) -> bool:
        eventually(lambda: not self.left(), seconds)
        return True


def waiting_ranks(root: int) -> list[int]:
    """The processes that wait below a `paddle-dp`, in the order of their ranks."""
    waiting = []
    for pid in Path(f"/proc/{root}/task/{root}/children").read_text().split():
        if b"launch/waiting_rank.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
            waiting.append(int(pid))
    return waiting


def serve() -> None:
    from paddle_dp.launch.command import Job
    from paddle_dp.launch.prepared_ranks import WaitingRanks
    from paddle_dp.launch.start import run

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    variables = dict(os.environ)
    with WaitingRanks() as waiting:
        for line in sys.stdin:
            words, screens, env = json.loads(line)
            for descriptor, name in enumerate(screens, 1):
                file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                os.dup2(file, descriptor)
                os.close(file)
            os.environ.update(env)
            status = run(Job(**{**words, "recipe": Path(words["recipe"])}), waiting)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os.environ.clear()
            os.environ.update(variables)
            answers.write(f"{status}\n")


if __name__ == "__main__":
    serve()
