"""Ranks without a start: processes that have imported everything wait, and those of each job are forks of them.

For many short jobs one after another, on CPUs: the layouts of a proof. Each rank has a waiting process of its own, so
two ranks share no more than two that are started do, not even the order of Python's sets. A job that dies, or is ended
because it is stuck, takes nothing with it: its ranks were forks, and the next job has new ones.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen
from types import TracebackType

from paddle_dp.launch.command import Plan, worker_arguments
from paddle_dp.launch.logs import worker_log
from paddle_dp.launch.processes import descendants, kill_all, tied_to
from paddle_dp.launch.waiting_rank import Case

PROGRAM = Path(__file__).with_name("waiting_rank.py")
ON_LINUX = os.path.isdir("/proc/self/task")
# What differs from job to job without being read when Paddle is imported.
JOB_VARIABLES = ("PADDLE_DP_", "PADDLE_LOG_DIR", "PORT_RANGE")


class Forks:
    """The ranks of one job, as its supervisor sees them; `watch.Launcher` is the same for those of Paddle's."""

    def __init__(self, waiting: list[Popen[bytes]]):
        self._waiting = waiting
        self.pid, self.returncode = waiting[0].pid, 0
        self._ranks = {rank: number for rank, each in enumerate(waiting) if (number := _answer(each))}

    def ranks(self) -> Mapping[int, int]:
        """The pid of each rank."""
        return self._ranks

    def left(self) -> list[int]:
        """What lives of them and of what they have started."""
        return [pid for each in self._waiting for pid in descendants(each.pid)]

    def poll(self) -> int | None:
        """None while every waiting process waits; a rank whose own has ended has ended, too."""
        ended = [code for each in self._waiting if (code := each.poll()) is not None]
        self.returncode = (128 - ended[0] if ended[0] < 0 else ended[0] or 1) if ended else 0
        return self.returncode or None

    def wait(self) -> int:
        """Lets the waiting processes forget the ranks; nothing of these is left afterwards."""
        for each in self._waiting:
            if each.poll() is None:
                _write(each, b"\n")
                _answer(each)
        return self.returncode


class WaitingRanks:
    """Starts the ranks of jobs as forks, wherever that is safe; within a `with`, at whose end nobody waits any more."""

    def __init__(self) -> None:
        self._waiting: list[Popen[bytes]] = []
        self._environment: dict[str, str] = {}
        self._safe = True

    def __enter__(self) -> WaitingRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._waiting:
            kill_all(lambda pid=each.pid: descendants(pid))  # type: ignore[misc]
            each.kill()
            each.wait()
        self._waiting = []

    def begin(self, plan: Plan, variables: Mapping[str, str], attempt: Path) -> Forks | None:
        """The plan's ranks, which write to `attempt`; None where they must be started instead.

        That is on accelerators, whose drivers survive no fork; on several nodes; for a script; and where a library has
        started a thread that a fork would lose.
        """
        if plan.devices or plan.nodes > 1 or plan.job.script or not ON_LINUX or not self._safe:
            return None
        if not self._let_wait(plan, {n: v for n, v in variables.items() if not n.startswith(JOB_VARIABLES)}):
            return None
        arguments, processes = worker_arguments(plan), self._waiting[: plan.ranks]
        for rank, (each, told) in enumerate(
            zip(processes, launched(plan.ranks, variables, attempt), strict=True)
        ):
            case = Case(arguments, {**variables, **told}, str(worker_log(attempt, rank)))
            _write(each, case.as_line())
        return Forks(processes)

    def _let_wait(self, plan: Plan, environment: dict[str, str]) -> bool:
        """Has as many processes wait as the plan has ranks, started in this environment: libraries read it when loaded.

        Whether they can be forked.
        """
        if environment != self._environment or any(each.poll() is not None for each in self._waiting):
            self.__exit__(None, None, None)
        self._environment = environment
        new = [
            Popen(
                [sys.executable, "-u", str(PROGRAM), plan.job.entry_point],
                env=environment, stdin=PIPE, stdout=PIPE, start_new_session=True,
                preexec_fn=tied_to(os.getpid()),  # noqa: PLW1509 - prctl and getppid only
            )
            for _ in range(plan.ranks - len(self._waiting))
        ]  # fmt: skip
        self._waiting += new
        threads = [_answer(each) for each in new]
        self._safe = all(number == 1 for number in threads)
        return self._safe


def launched(ranks: int, variables: Mapping[str, str], folder: Path) -> list[dict[str, str]]:
    """What Paddle's launcher gives each rank of one node on CPUs, beside `variables`; its logs are in `folder`."""
    free = _free(variables.get("PORT_RANGE", "0:0"), ranks + 1) or _free("0:0", ranks + 1)
    store, *endpoints = (f"127.0.0.1:{port}" for port in free)
    job = {
        "PADDLE_MASTER": store, "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints), "PADDLE_NNODES": "1",
        **dict.fromkeys(("PADDLE_GLOBAL_SIZE", "PADDLE_LOCAL_SIZE", "PADDLE_TRAINERS_NUM"), str(ranks)),
        "PADDLE_LOG_DIR": str(folder), "PADDLE_DISTRI_BACKEND": "gloo", "PADDLE_AUTO_CLUSTER": "0",
    }  # fmt: skip
    numbers = ("PADDLE_GLOBAL_RANK", "PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE", "PADDLE_TRAINER_ID")
    return [
        {**job, "PADDLE_CURRENT_ENDPOINT": endpoint, **dict.fromkeys(numbers, str(rank))}
        for rank, endpoint in enumerate(endpoints)
    ]


def _free(port_range: str, count: int) -> list[int]:
    """Ports of this range at which nobody listens, of any where it is 0:0; empty if there are fewer than `count`."""
    first, _, last = port_range.partition(":")
    free: list[int] = []
    with ExitStack() as probes:  # open to the end, or the kernel might give a port twice
        for port in range(int(first), int(last) + 1) if int(first) else [0] * count:
            probe = probes.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            free.append(probe.getsockname()[1])
            if len(free) == count:
                return free
    return []


def _answer(waiting: Popen[bytes]) -> int:
    """The next number that a waiting process says; 0 where it has ended."""
    assert waiting.stdout is not None
    return int(waiting.stdout.readline() or b"0")


def _write(waiting: Popen[bytes], line: bytes) -> None:
    assert waiting.stdin is not None
    try:
        waiting.stdin.write(line)
        waiting.stdin.flush()
    except BrokenPipeError:  # it has ended, which `poll` says
        pass
