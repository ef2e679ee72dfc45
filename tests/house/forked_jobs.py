"""Supervisors as forks of the process that waits (rank_pool.py): jobs without the start of one or all processes.

Their ranks are forks as well, for what comes once these are at work: how they fail, what is said of it, and that nobody
is left. Paddle's launcher starts them, where this matters.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

from paddle_dp.launch.command import LaunchPlan, rank_arguments
from paddle_dp.launch.logs import rank_log
from paddle_dp.launch.prepared_ranks import launched
from paddle_dp.launch.processes import adopt_orphans, alive, descendants, die_with_parent, exit_of, kill_all
from tests.eventually import eventually
from tests.house.programs import end_with
from tests.rank_pool import draw_anew, rank_pool
from tests.ranks import ROOT, _environment, _name


class ForkedRanks:
    """Starts the ranks of a job as forks: `launch.start.run` takes it as `waiting`.

    A child of the supervisor forks them before that one has imported anything, and adopts what loses its parent: to the
    supervisor it is what Paddle's launcher is.
    """

    def __enter__(self) -> ForkedRanks:
        self._asks, answers = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._asks.close()
            _fork_ranks(answers)
        answers.close()
        self._answers = self._asks.makefile()
        return self

    def __exit__(self, *_: object) -> None:
        """What the ranks have left behind goes on, for the test to see."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def ask(self, cases: list[list[Any]]) -> list[int]:
        self._asks.sendall(json.dumps(cases).encode() + b"\n")
        return json.loads(self._answers.readline())

    def begin(self, plan: LaunchPlan, variables: Mapping[str, str], attempt: Path) -> Forked | None:
        return None if plan.nodes > 1 else Forked(self, plan, variables, attempt)


class Forked:
    """The ranks of one attempt, as their supervisor sees them (`rank_monitor.Started`)."""

    def __init__(self, above: ForkedRanks, plan: LaunchPlan, variables: Mapping[str, str], attempt: Path):
        additions = enumerate(launched(plan.ranks, variables, attempt))
        cases = [
            [rank_arguments(plan), {**variables, **each}, str(rank_log(attempt, rank))]
            for rank, each in additions
        ]
        self._above, self.pid = above, above.pid
        self._ranks = dict(enumerate(above.ask(cases)))

    def ranks(self) -> Mapping[int, int]:
        return self._ranks

    def left(self) -> list[int]:
        return descendants(self.pid)

    def poll(self) -> int | None:
        gone, code = exit_of(self.pid)
        return (code or 1) if gone else None

    def wait(self) -> None:
        self._above.ask([])


def _fork_ranks(asks: socket.socket) -> NoReturn:
    """Forks the ranks of each case, which stay visible with their exit status until the next line."""
    die_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in asks.makefile():
        cases, pids = json.loads(line), []
        for case in cases:
            pids.append(os.fork())
            if pids[-1] == 0:
                asks.close()
                _become_rank(*case)
        with suppress(ChildProcessError):
            while not cases:
                os.wait()
        asks.sendall(json.dumps(pids).encode() + b"\n")
    os._exit(0)


def _become_rank(arguments: list[str], variables: dict[str, str], log: str) -> NoReturn:
    """A rank as Paddle's launcher starts it: its log, a session, variables and signals."""
    from paddle_dp.launch import recipe_rank
    from paddle_dp.launch.waiting_rank import become

    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.environ.clear()
    become(variables, log)
    sys.argv[1:] = arguments
    end_with(recipe_rank.main)


class ForkedSupervisor:
    """A supervisor at work on a job with these words (tests/faults/start.py), with the methods of a `Popen`.

    `launches`: Paddle's launcher starts the ranks. `screen`: a terminal; else its output is two files in `folder`.
    Another process has forked it, stays until no process of the job is left, and adopts what loses its parent.
    """

    def __init__(
        self,
        words: Mapping[str, Any],
        env: Mapping[str, str],
        folder: Path,
        launches: bool = False,
        screen: str | None = None,
    ):
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.returncode: int | None = None
        screens = [screen] * 2 if screen else [str(folder / "stdout"), str(folder / "stderr")]
        arguments = [str(folder), dict(words), dict(env), launches, screens]
        (folder / "args.json").write_text(json.dumps([arguments, {}]))
        pool = rank_pool(_environment({}), ROOT)
        others = descendants(pool.process.pid)
        pool.serve(_name(supervise), folder)
        try:
            eventually((folder / "begun").exists, 100)
        except BaseException:
            kill_all(lambda: [pid for pid in descendants(pool.process.pid) if pid not in others])
            raise
        self._above, self.pid = map(int, (folder / "begun").read_text().split())

    def poll(self) -> int | None:
        with suppress(FileNotFoundError):
            self.returncode = int((self._folder / "ended").read_text())
        return self.returncode

    def wait(self, timeout: float = 60) -> int:
        end = time.monotonic() + timeout
        while True:
            living = alive(self._above)  # asked first: it may note the end now, and end itself
            if (status := self.poll()) is not None:
                return status
            assert living, "the process above the supervisor has ended"
            assert time.monotonic() < end, f"not within {timeout:g} s: {self._said()}"
            time.sleep(0.02)

    def communicate(self, timeout: float = 60) -> tuple[str, str]:
        self.wait(timeout)
        return self._said()

    def _said(self) -> tuple[str, str]:
        files = (self._folder / name for name in ("stdout", "stderr"))
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in files)
        return out, err

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def left(self) -> list[int]:
        """The processes of this job that still run."""
        return descendants(self._above)


def supervise(
    folder: str, words: dict[str, Any], env: dict[str, str], launches: bool, screens: list[str]
) -> NoReturn:
    """In a fork of the waiting process: forks the supervisor, and waits for the end of all that it starts."""
    adopt_orphans()
    supervisor = os.fork()
    if supervisor == 0:
        _become_supervisor(words, env, launches, screens)
    _leave(folder, "begun", f"{os.getpid()} {supervisor}")
    with suppress(ChildProcessError):
        while True:
            child, status = os.wait()
            if child == supervisor:
                _leave(folder, "ended", str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _leave(folder: str, name: str, content: str) -> None:
    """Writes a file under its final name at once; nothing where the test is over, and its folder gone."""
    with suppress(FileNotFoundError):
        Path(folder, f".{name}").write_text(content)
        Path(folder, f".{name}").rename(Path(folder, name))


def _become_supervisor(
    words: dict[str, Any], env: dict[str, str], launches: bool, screens: list[str]
) -> NoReturn:
    from tests.faults.start import begin

    die_with_parent()
    for descriptor, name in enumerate(screens, 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(env)
    draw_anew()

    def main() -> int:
        with nullcontext() if launches else ForkedRanks() as ranks:
            return begin(words, ranks)

    end_with(main)
