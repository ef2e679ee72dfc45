"""Processes that import Paddle before their job is known: ranks that wait to be forked, and Paddle's launcher.

Waiting ranks serve many short jobs in sequence on CPUs: the layouts of a proof. Each rank has a separate waiting
process, so two ranks share no more than two new processes, not even the order of Python's sets. A job that dies or
hangs harms no other job. A launcher is started ahead of each attempt: it and the command import Paddle concurrently at
first, and a restart waits for no import of it.
"""

from __future__ import annotations

import json
import secrets
import select
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen

from paddle_dp.launch.command import MODULE, LaunchPlan, argv, environment, rank_arguments
from paddle_dp.launch.logs import rank_log
from paddle_dp.launch.network import free_ports
from paddle_dp.launch.privately import for_launcher, in_the_open
from paddle_dp.launch.processes import child_options, descendants, kill_all
from paddle_dp.launch.rank_monitor import LAUNCHER_MARK, Launcher, Started
from paddle_dp.launch.waiting_rank import Case

RANK_PROGRAM = Path(__file__).with_name("waiting_rank.py")
LAUNCHER_PROGRAM = Path(__file__).with_name("prelaunch_process.py")
# Variables that differ between jobs and are not read when Paddle is imported.
JOB_VARIABLES = ("PADDLE_DP_", "PADDLE_LOG_DIR", "PORT_RANGE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ANSWER = 180.0  # seconds for a waiting process to import Paddle, or to end a rank, on a busy machine
IMPORT_AFTER = 6.0  # seconds after which a restart's processes import Paddle, when the ranks have started


class Forks:
    """The forked ranks of one job, for the supervisor; `rank_monitor.Launcher` has the same interface for Paddle's."""

    def __init__(self, waiting: list[Popen[bytes]]):
        self._waiting = waiting
        self.pid = waiting[0].pid
        self._ranks = {rank: number for rank, each in enumerate(waiting) if (number := _answer(each))}

    def ranks(self) -> Mapping[int, int]:
        """Returns the pid of each rank."""
        return self._ranks

    def left(self) -> list[int]:
        """Returns the pids of living ranks and their living descendants."""
        return [pid for each in self._waiting for pid in descendants(each.pid)]

    def poll(self) -> int | None:
        """Returns None while every waiting process lives, else an exit status: its rank has ended with it."""
        ended = [code for each in self._waiting if (code := each.poll()) is not None]
        return (128 - ended[0] if ended[0] < 0 else ended[0] or 1) if ended else None

    def wait(self) -> None:
        """Makes the waiting processes kill and reap the ranks; no process of them is left afterwards."""
        living = [each for each in self._waiting if each.poll() is None]
        for each in living:
            _write(each, b"\n")
        for each in living:
            _answer(each)


class WaitingRanks:
    """Starts the ranks of jobs as forks, wherever that is safe; the end of its `with` ends the waiting processes.

    `preloads_recipe`: all jobs train one recipe, whose parts the waiting processes import, too.
    """

    def __init__(self, preloads_recipe: bool = False) -> None:
        self._preloads_recipe = preloads_recipe
        self._waiting: list[Popen[bytes]] = []
        self._importing: list[Popen[bytes]] = []  # those that have not answered yet
        self._environment: dict[str, str] = {}
        self._safe = True

    def __enter__(self) -> WaitingRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        """Ends the waiting processes, and all that they have started."""
        for each in self._waiting:
            kill_all(lambda pid=each.pid: descendants(pid))  # type: ignore[misc]
            each.kill()
            each.wait()
        self._waiting, self._importing = [], []

    def begin(self, plan: LaunchPlan, variables: Mapping[str, str], attempt: Path) -> Forks | None:
        """Starts the plan's ranks, which write to `attempt`; returns None if they must be new processes.

        These are needed on accelerators, whose drivers survive no fork; on several nodes; for a script; and if a
        library has started a thread that a fork would lose.
        """
        if plan.devices or plan.nodes > 1 or plan.job.script or not self._safe:
            return None
        self.start(plan, variables)
        for each in self._importing:
            _write(each, b"\n")  # those that still let the ranks start first import now
        threads = [_answer(each) for each in self._importing]
        self._importing, self._safe = [], all(number == 1 for number in threads)
        if not self._safe:
            return None
        arguments, processes = rank_arguments(plan), self._waiting[: plan.ranks]
        rank_variables = launched(plan.ranks, variables, attempt)
        for rank, (each, additions) in enumerate(zip(processes, rank_variables, strict=True)):
            case: Case = (arguments, {**variables, **additions}, str(rank_log(attempt, rank)))
            _write(each, (json.dumps(case) + "\n").encode())
        return Forks(processes)

    def start(self, plan: LaunchPlan, variables: Mapping[str, str], delay: float = 0.0) -> None:
        """Starts as many waiting processes as the plan has ranks, unless they wait already. They import Paddle after
        `delay` seconds, or as soon as `begin` needs them.

        Another environment starts new ones, as libraries read it when loaded.
        """
        environment = {n: v for n, v in variables.items() if not n.startswith(JOB_VARIABLES)}
        if environment != self._environment or any(each.poll() is not None for each in self._waiting):
            self._end()
        self._environment = environment
        command = [sys.executable, "-u", str(RANK_PROGRAM), plan.job.entry_point, str(delay)]
        command += [str(plan.job.recipe), *plan.job.all_overrides] if self._preloads_recipe else []
        new = [
            Popen(command, env=environment, stdin=PIPE, stdout=PIPE, **child_options())
            for _ in range(plan.ranks - len(self._waiting))
        ]
        self._waiting += new
        self._importing += new


class Spares:
    """Makes processes wait for a job's restarts while its ranks train: a later attempt's ranks are forks of them, which
    need not import Paddle. `first` starts the first attempt. The end of its `with` ends the waiting processes.

    An elastic job has one for each rank that it may have. Where another number of ranks means another number of threads
    for each, which libraries read when loaded, new ones replace them, and the attempt waits for their imports.
    """

    def __init__(self, first: PreparedLauncher):
        self._first: PreparedLauncher | None = first
        self._waiting = WaitingRanks(preloads_recipe=True)

    def __enter__(self) -> Spares:
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.__exit__()

    def begin(self, plan: LaunchPlan, variables: Mapping[str, str], attempt: Path) -> Started | None:
        """Starts the plan's ranks; returns None if Paddle's launcher must start them."""
        first, self._first = self._first, None
        if first is None:
            return self._waiting.begin(plan, variables, attempt)
        if not plan.devices:
            most = max(plan.ranks, plan.job.ranks or 0)
            self._waiting.start(replace(plan, ranks=most), variables, IMPORT_AFTER)
        started = first.begin(plan, variables, attempt)
        import_module("paddle_dp.launch.resume")  # while the ranks start: a restart needs it at once
        return started


def launched(ranks: int, variables: Mapping[str, str], folder: Path) -> list[dict[str, str]]:
    """Returns the variables that Paddle's launcher would add for each rank of one node on CPUs, with logs in `folder`.

    PORT_RANGE of `variables` limits the ports.
    """
    free = free_ports(variables.get("PORT_RANGE", "0:0"), ranks + 1) or free_ports("0:0", ranks + 1)
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


def _answer(waiting: Popen[bytes]) -> int:
    """Returns the next number that a waiting process writes; 0 if it has ended.

    A stopped one (SIGSTOP) is continued, and one that does not answer for ANSWER seconds is killed: no clock runs here.
    """
    assert waiting.stdout is not None
    waiting.send_signal(signal.SIGCONT)
    if not select.select([waiting.stdout], [], [], ANSWER)[0]:
        waiting.kill()
        return 0
    return int(waiting.stdout.readline() or b"0")


def _write(waiting: Popen[bytes], line: bytes) -> None:
    assert waiting.stdin is not None
    with suppress(BrokenPipeError):  # it has ended, as `poll` reports
        waiting.stdin.write(line)
        waiting.stdin.flush()


class PreparedLauncher:
    """Keeps a launcher for a job's next attempt ready within a `with`; ends an unused one at its exit.

    `plan` is the plan before the recipe is read. If the recipe changes the environment, which libraries read when
    loaded, `begin` returns None, and a new launcher must be started. In a job with `restarts` each `begin` starts the
    next one, unless `renews` is False.
    """

    def __init__(self, plan: LaunchPlan, inherited: Mapping[str, str], renews: bool = True):
        self._environment = {n: v for n, v in environment(plan, inherited).items() if in_the_open(n)}
        self._renews = renews
        self._launcher: Launcher | None = None
        self._hidden = ExitStack()

    def __enter__(self) -> PreparedLauncher:
        self._start(0.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()
        self._hidden.close()

    def _start(self, delay: float) -> None:
        """Starts a launcher that imports Paddle after `delay` seconds, or as soon as `begin` needs it."""
        mark = secrets.token_hex(8)
        launcher = Launcher(
            [sys.executable, "-u", str(LAUNCHER_PROGRAM), MODULE, str(delay)],
            env=self._environment | {LAUNCHER_MARK: mark}, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL,
            **child_options(),
        )  # fmt: skip
        launcher.mark, self._launcher = mark, launcher

    def drop(self) -> None:
        """Ends the launcher if it has not begun, and starts no other: the job needs none."""
        self._renews = False
        self._end()

    def _end(self) -> None:
        if self._launcher is not None:
            self._launcher.kill()
            self._launcher.wait()
            self._launcher = None

    def begin(self, plan: LaunchPlan, variables: Mapping[str, str], attempt: Path) -> Launcher | None:
        """Lets the launcher start the plan and returns it; returns None if a new launcher must be started."""
        self._hidden.close()  # of the attempt before, whose ranks have ended
        launcher = self._begun(plan, self._hidden.enter_context(for_launcher(variables)), attempt)
        if launcher is None:
            self._end()
        self._launcher = None
        # A launcher counts devices at its import: an elastic job's next attempt may have one that has returned since.
        if self._renews and plan.job.restarts and not (plan.devices and plan.job.elastic):
            of_job = {n: v for n, v in self._environment.items() if n.startswith(JOB_VARIABLES)}
            self._environment = of_job | _when_loaded(variables)  # not the variables of this attempt
            # Too many processes, or too little memory: the restart imports Paddle itself.
            with suppress(OSError):
                self._start(IMPORT_AFTER)
        return launcher

    def _begun(self, plan: LaunchPlan, env: dict[str, str], attempt: Path) -> Launcher | None:
        launcher, args = self._launcher, argv(plan, attempt)
        line = [args[args.index(MODULE) + 1 :], env, str(attempt / "launcher.log")]
        if launcher is None or launcher.poll() is not None:
            return None
        if _when_loaded(env) != _when_loaded(self._environment):
            return None
        launcher.send_signal(signal.SIGCONT)  # a stopped one would never begin
        assert launcher.stdin is not None
        try:
            with launcher.stdin as file:
                file.write((json.dumps(line) + "\n").encode())
        except BrokenPipeError:  # it has ended: the new launcher will report why
            return None
        launcher.expected, launcher.first_log = plan.numbers, rank_log(attempt, 0)
        return launcher


def _when_loaded(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that Python and Paddle's libraries read when loaded, without the job's variables."""
    return {n: v for n, v in variables.items() if in_the_open(n) and not n.startswith(JOB_VARIABLES)}
