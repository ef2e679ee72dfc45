"""Runs a job's ranks under supervision, in one or several attempts; each resumes from earlier checkpoints."""

from __future__ import annotations

import io
import json
import math
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import DEVNULL, STDOUT
from typing import TYPE_CHECKING, Any, BinaryIO

from paddle_dp.errors import EndedError, UsageError
from paddle_dp.files import replacing
from paddle_dp.launch import console, failures, logs
from paddle_dp.launch.command import LaunchPlan, argv, environment
from paddle_dp.launch.network import reserved_ports
from paddle_dp.launch.privately import for_launcher
from paddle_dp.launch.processes import Signals, child_options, recorded_signals
from paddle_dp.launch.rank_launcher import RankLauncher
from paddle_dp.launch.rank_monitor import Launcher, PreparedRanks
from paddle_dp.launch.rank_supply import LOOK
from paddle_dp.launch.restarts import AttemptResult, Restart, decide
from paddle_dp.launch.supervisor import MARK, ExternalEvents, JobEnd, Supervision, board_of
from paddle_dp.mesh import secret
from paddle_dp.mesh.heartbeat import STARTED

if TYPE_CHECKING:
    from paddle_dp.launch.resume import ResumePoint

ENDED = "ended.json"  # in an attempt's folder; report/run_record.py reads it
NextPlan = Callable[[Sequence[AttemptResult]], LaunchPlan]
"""Makes the next attempt's plan from the results of earlier ones, with as many ranks as are available now."""


def run(
    next_plan: NextPlan,
    attempt: Path,
    inherited: Mapping[str, str],
    resize: Callable[[LaunchPlan], str],
    prepared: PreparedRanks | None = None,
    ends_process: bool = False,
) -> int:
    """Runs the job until it is done, or `restarts.decide` gives it up; returns the exit status of its last attempt.

    Each attempt has a folder of logs, the first one `attempt`. `resize` returns why a running attempt must stop for
    another number of ranks, or "". `prepared` starts the ranks, if it can. `ends_process`: see `Job`.
    """
    history: list[AttemptResult] = []
    with recorded_signals(ends_process) as signals:
        plan = next_plan(history)
        started = time.monotonic()
        console.announce(plan, environment(plan, inherited), attempt)
        point = first_point(plan, attempt)
        while True:
            resizing = _Resizing(resize, plan)
            outside = ExternalEvents(signals=signals, must_stop=resizing)
            result = run_once(plan, attempt, inherited, point, started, outside, prepared)
            resizes = bool(result.stopped and not signals.number and resizing.reason)
            if resizes or (plan.job.restarts and not result.final):
                point = next_point(plan, attempt)
                result = replace(result, saved=point.saved)
            if not resizes:
                history.append(result)
                then = decide(history, plan.job.restarts, bool(plan.job.script))
                if not isinstance(then, Restart):
                    return console.show_end(result, plan, then)
                console.show_restart(result, plan, then, point.label)
                if _interrupted(signals, then.wait):
                    ended = AttemptResult(attempt=attempt, status=128 + signals.number, signal=signals.name)
                    return console.show_end(ended, plan)
            try:
                plan, attempt = next_plan(history), logs.fresh(attempt.parent.parent)
            except UsageError as error:  # too few ranks are left, or too little disk
                return console.show_end(result, plan, f"not started again: {error}")
            if resizes:
                console.resized(plan, point.label)


def _note_end(result: AttemptResult, plan: LaunchPlan, began: float) -> None:
    """Writes how an attempt ended to its folder, for reports: ranks that were killed leave no record themselves.

    `began`: in seconds since 1970. Does not raise on a full disk.
    """
    ranks = plan.all_ranks
    cause = f"ended by {result.signal}" if result.signal else "Paddle's launcher ended"
    if result.cause is not None:
        cause = failures.in_a_line(result.cause, ranks, result.consequences)
        cause = cause.replace(result.cause.in_short, f"{result.cause.kind}: {result.cause.message}"[:4000])
    stopped = result.stopped or bool(result.signal)
    fields = {"status": result.status, "stopped": stopped, "cause": cause if result.status else ""}
    with suppress(OSError), replacing(result.attempt / ENDED) as partial:
        partial.write_text(json.dumps({**fields, "began": began, "ended": time.time()}, indent=1))


@dataclass
class _Resizing:
    """Asks `resize` every LOOK seconds for a reason to stop an attempt of `plan`, and keeps that reason."""

    resize: Callable[[LaunchPlan], str]
    plan: LaunchPlan
    reason: str = ""
    looked: float = -math.inf

    def __call__(self) -> str:
        now = time.monotonic()
        if not self.reason and now - self.looked >= LOOK:
            self.looked, self.reason = now, self.resize(self.plan)
        return self.reason


def run_once(  # noqa: PLR0913 - the caller sets each condition of an attempt
    plan: LaunchPlan,
    attempt: Path,
    inherited: Mapping[str, str],
    point: ResumePoint,
    started: float,
    outside: ExternalEvents,
    prepared: PreparedRanks | None = None,
) -> AttemptResult:
    """Runs the plan's ranks from `point`, under supervision, until none of their processes is left.

    `prepared` starts them if it can, else Paddle's launcher. `started`: start of the job's first attempt, in seconds of
    the monotonic clock. The result's `saved` is not set.
    """
    began = time.time()
    plan = replace(plan, job=replace(plan.job, resume=point.resume))
    variables = environment(plan, inherited) | {STARTED: repr(started)}
    screen = _screen(plan, variables)
    job_end, supervision = supervise(plan, attempt, argv(plan, attempt), variables, outside, screen, prepared)
    result = AttemptResult(
        attempt=attempt, status=job_end.status, signal=outside.signals.name, began=point.step,
        step=max(supervision.steps.values(), default=point.step), plan=plan,
    )  # fmt: skip
    if (cause := job_end.cause) is not None:
        result = replace(
            result, cause=cause, consequences=job_end.consequences, log=supervision.log_of(cause.rank),
            step=max(point.step, supervision.steps.get(cause.rank, 0)),
        )  # fmt: skip
    _note_end(result, plan, began)
    return result


def supervise(  # noqa: PLR0913 - the caller sets each condition of an attempt
    plan: LaunchPlan,
    attempt: Path,
    command: Sequence[str],
    variables: Mapping[str, str],
    outside: ExternalEvents,
    screen: BinaryIO | None = None,
    prepared: PreparedRanks | None = None,
) -> tuple[JobEnd, Supervision]:
    """Runs the launcher's `command`, or `prepared`, under supervision; returns how it ended.

    `screen` gets rank 0's output in addition to its log. Events from `outside` also end the job. Afterwards none of its
    processes is left.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    with (
        reserved_ports() as ports,
        board_of(plan) as board,
        (attempt / "launcher.log").open("wb") as log,
        ExitStack() as hidden,
    ):
        env = {**ports, **variables, **(board.variables if board else {}), MARK: mark} | _secret(plan)
        process = None if prepared is None else prepared.begin(plan, env, attempt)
        if process is None and plan.launches_ranks:
            process = RankLauncher(plan, env, attempt)
        if process is None:
            process = Launcher(
                command, env=hidden.enter_context(for_launcher(env)), stdin=DEVNULL, stdout=log,
                stderr=STDOUT, **child_options(),
            )  # fmt: skip
            process.expected, process.first_log = plan.numbers, logs.rank_log(attempt, 0)
        supervision = Supervision(plan, process, attempt, mark, outside, board)
        job_end = supervision.wait(logs.Follower(logs.rank_log(attempt, 0), screen))
    return job_end, supervision


def run_command(
    plan: LaunchPlan,
    folder: Path,
    command: Sequence[str],
    variables: Mapping[str, str],
    must_end: Callable[[], bool] = lambda: False,
) -> JobEnd:
    """Runs the launcher's `command` under supervision, with logs in `folder`; returns how it ended.

    The ranks are ended as soon as `must_end()`. Raises EndedError if a signal to this process has ended them.
    """
    with recorded_signals() as signals:
        outside = ExternalEvents(signals=signals, must_end=must_end)
        job_end, _ = supervise(plan, folder, command, variables, outside)
    if signals.number:
        raise EndedError(signals.number)
    return job_end


def _secret(plan: LaunchPlan) -> dict[str, str]:
    """Returns the variables with the attempt's secret, shared by its ranks and hidden from other users."""
    if plan.meeting is None:
        return {secret.VARIABLE: secrets.token_hex(secret.BYTES)}
    return {secret.VARIABLE: plan.meeting.key.hex(), **({} if plan.meeting.seals else {secret.SEAL: "off"})}


def _screen(plan: LaunchPlan, variables: dict[str, str]) -> BinaryIO | None:
    """Returns the stream to copy rank 0's output to. On a terminal rank 0 draws itself, and nothing is copied."""
    if plan.job.quiet:
        return None
    if sys.stdout.isatty() and not plan.job.node_rank:
        variables["PADDLE_DP_TTY"] = os.ttyname(sys.stdout.fileno())
        return None
    sys.stdout.flush()
    return sys.stdout.buffer if isinstance(sys.stdout, io.TextIOWrapper) else None


def first_point(plan: LaunchPlan, attempt: Path, stocks: Iterable[Any] | None = None) -> ResumePoint:
    """Returns where the first attempt begins: at --resume; a job with restarts skips damaged newest checkpoints."""
    if plan.job.restarts and plan.job.resume == "newest" and not plan.job.script:
        return next_point(plan, attempt, stocks)
    from paddle_dp.launch.resume import ResumePoint

    return ResumePoint(resume=plan.job.resume)


def next_point(plan: LaunchPlan, attempt: Path, stocks: Iterable[Any] | None = None) -> ResumePoint:
    """Returns where a later attempt begins: at the newest good checkpoint; a script finds its checkpoint itself.
    `stocks`: of `resume.newest_point`."""
    from paddle_dp.launch import resume  # imports NumPy, which few jobs need here

    if plan.job.script:
        label = 'its newest checkpoint, with Trainer.of(…, resume="auto"), or else from the beginning,'
        return resume.ResumePoint(label=label)
    folder = attempt.parent.parent
    return resume.newest_point(plan.job, folder, plan.began, console.write, plan.memory, stocks)


def _interrupted(signals: Signals, seconds: float) -> bool:
    """Waits up to `seconds`; returns True as soon as a signal asks the job to end."""
    end = time.monotonic() + seconds
    while not signals.number and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))
    return bool(signals.number)
