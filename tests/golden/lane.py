"""Runs `paddle-dp` commands one after the other, with ranks that are forks of processes which wait.

A start costs two seconds of each rank, for importing Paddle, and a record has a hundred of them. All else is as on the
command line: the plan, the checks, the supervision, the screen. As a program it answers each line of stdin, a JSON list
of the arguments and the files for stdout and stderr, with a line that holds the exit status.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from threading import Timer
from types import TracebackType

LIMIT = 900.0  # seconds of a command
# What starts a job, and what has its ranks wait: the first pair that the tree has. One that moves gets a line here.
SEAMS = (
    ("paddle_dp.launch.start:run", "paddle_dp.launch.prepared_ranks:WaitingRanks"),
    ("paddle_dp.launch.start:run", "paddle_dp.launch.waiting:WaitingRanks"),
)


class Lanes:
    """`count` programs of this file, with the package of `tree`, within a `with`; in `folder`, for a command looks into
    `runs` where it is called."""

    def __init__(self, tree: Path, folder: Path, count: int, environment: Mapping[str, str]):
        self.tree, self._folder, self._environment = tree, folder, dict(environment)
        self._all = [self._lane() for _ in range(count)]
        self._free: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        for lane in self._all:
            self._put(lane)

    def _put(self, lane: subprocess.Popen[str]) -> None:
        """Lets a lane have cases, once it has its seams. Raises SystemExit if it has ended instead: it said why."""
        assert lane.stdout is not None
        if not lane.stdout.readline():
            raise SystemExit(lane.wait() or 1)
        self._free.put(lane)

    def _lane(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, __file__], cwd=self._folder, env=self._environment, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Lanes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._all:
            lane.communicate()

    def run(self, command: str, scratch: Path) -> tuple[int | str, str, str]:
        """The exit status of a command of `paddle-dp`, or why it has none; and what it printed, both by files there."""
        words, files = shlex.split(command), [scratch / "stdout", scratch / "stderr"]
        if words[0] in ("train", "evaluate") and _ranks(words) > 1:
            status = self._in_forks([words, *map(str, files)])
        else:  # one rank is a process of its own: nothing is forked
            with files[0].open("w") as screen, files[1].open("w") as errors:
                status = subprocess.run(
                    [sys.executable, "-m", "paddle_dp", *words], cwd=self._folder, env=self._environment,
                    stdin=subprocess.DEVNULL, stdout=screen, stderr=errors, timeout=LIMIT,
                ).returncode  # fmt: skip
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in files)
        return status, out, err

    def _in_forks(self, case: Sequence[object]) -> int | str:
        lane = self._free.get()
        timer = Timer(LIMIT, lane.kill)
        timer.start()
        assert lane.stdin is not None and lane.stdout is not None
        lane.stdin.write(json.dumps(case) + "\n")
        lane.stdin.flush()
        answer = lane.stdout.readline()
        timer.cancel()
        if not answer:  # the next case gets a new one
            self._all.remove(lane)
            lane.kill()
            self._all.append(self._lane())
            self._put(self._all[-1])
        else:
            self._free.put(lane)
        return int(answer) if answer else f"none within {LIMIT:g} s, or its own process ended"


def _ranks(words: Sequence[str]) -> int:
    return int(words[words.index("--ranks") + 1]) if "--ranks" in words else 1


def _found(place: str) -> object:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for seam in SEAMS:
        try:
            run, waiting_ranks = map(_found, seam)
            break
        except (ImportError, AttributeError):
            continue
    else:
        sys.exit(f"{__file__}: this tree has none of {SEAMS}: add a pair of names to SEAMS.")
    answers.write("ready\n")
    with waiting_ranks() as waiting:  # type: ignore[operator]
        run.__defaults__ = (waiting,)  # type: ignore[attr-defined]
        for line in sys.stdin:
            answers.write(f"{_status(*json.loads(line))}\n")


def _status(words: Sequence[str], out: str, err: str) -> int:
    """Runs a command in this process, with these files for its screen."""
    from paddle_dp.cli import main

    kept = [os.dup(1), os.dup(2)]
    variables = dict(os.environ)
    for descriptor, name in ((1, out), (2, err)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, descriptor)
        os.close(file)
    try:
        main(words)
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, descriptor)
            os.close(copy)
        os.environ.clear()
        os.environ.update(variables)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    _serve()
