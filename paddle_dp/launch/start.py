"""Runs a job: whatever happens, the cause of a failure is last on the screen, and no process is left."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import BinaryIO

from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.launch import failures, logs
from paddle_dp.launch.command import Job, Limits, Plan, argv, environment, headline
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.inside import watched_inside
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.memory import available_memory
from paddle_dp.launch.network import meet, reserved_ports
from paddle_dp.launch.plan import check_memory, plan_of
from paddle_dp.launch.processes import tied_to
from paddle_dp.launch.signals import Signals
from paddle_dp.launch.silence import ignore_ccache, import_paddle
from paddle_dp.launch.supervisor import MARK, Supervision, board_of

OF_A_RUN = (
    "evaluate",
    "generate",
    "predict",
    "export",
)  # they read the recipe in a run's folder, perhaps another's


def run(job: Job) -> int:
    """Runs the job and returns its exit status. A usage error is shown as one message, a failure with its cause.

    0: done. 2: a usage error. 1 and others: of the rank that failed first. 128 + n: ended by signal n.
    """
    try:
        return _run(job)
    except PaddleDPError as error:
        _say(str(error))
        return error.exit_status
    except KeyboardInterrupt:  # while the recipe was read, before any process was started
        _say("interrupted.")
        return 130


def _run(job: Job) -> int:
    """Checks everything that can be refused before a process starts or a file is written, then runs the plan."""
    # Read now: importing paddle changes OMP_NUM_THREADS.
    machine, inherited = Machine.here(), dict(os.environ)
    plan = plan_of(job, machine)
    ignore_ccache()
    if plan.alone:
        # This process will be the rank; MKL and OpenMP read their variables when paddle is imported.
        _become(environment(plan, inherited))
        import_paddle()
    from paddle_dp.recipe import foreign_code, read_recipe
    from paddle_dp.recipe.folder import release

    if job.entry_point in OF_A_RUN and (foreign := foreign_code(job.recipe, job.all_overrides)):
        _say(f"{job.recipe} imports, and so runs, code that is not paddle_dp's: {', '.join(foreign)}")
    recipe = read_recipe(job.recipe, job.all_overrides)
    plan = plan_of(job, machine, recipe.train.device)
    for part in (recipe.strategy, *recipe.callbacks):
        part.refuse(recipe, plan.ranks * plan.nodes, plan.kind)
    check_memory(plan, available_memory())
    _check_resume(job)
    folder, path = _claimed(job, recipe.folder)
    attempt = logs.fresh(folder)
    job = replace(job, recipe=path, extra={**job.extra, "claimed": True})
    limits = Limits(watch=recipe.watch, sample=recipe.loader.timeout.seconds, nodes=plan.nodes)
    plan = replace(plan, job=job, began=attempt.stat().st_mtime, limits=limits)
    try:
        return _alone(plan, attempt) if plan.alone else _together(plan, attempt, inherited)
    finally:
        release(folder)


def _claimed(job: Job, folder: Path) -> tuple[Path, Path]:
    """Claims the run folder. Returns it, and the recipe's path, which changes if it was in an earlier run's folder.

    Nodes other than the first put their logs beside the folder, since the disk may be shared.
    """
    from paddle_dp.recipe.folder import claim

    if job.node_rank:
        return folder.with_name(f"{folder.name}.node-{job.node_rank}"), job.recipe
    moved = claim(folder, job.resume) if job.entry_point == "train" else None
    if moved is None:
        return folder, job.recipe
    if not job.quiet:
        print(f"the earlier run is now {moved}", flush=True)
    inside = job.recipe.resolve().is_relative_to(folder.resolve())
    return folder, moved / job.recipe.resolve().relative_to(folder.resolve()) if inside else job.recipe


def _check_resume(job: Job) -> None:
    if job.resume in (None, "newest", "best") or job.resume.isdecimal():  # found, or not, in the run's folder
        return
    if not Path(job.resume).exists():
        raise UsageError(
            f"--resume {job.resume}: there is no such checkpoint. Leave the path out for the newest one, or give best "
            "or a step."
        )


def _become(variables: dict[str, str]) -> None:
    """Gives this process the environment of a rank."""
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _announce(plan: Plan, variables: dict[str, str], attempt: Path) -> None:
    if not plan.job.quiet:
        print(headline(plan, variables, attempt.parent.parent), flush=True)


def _alone(plan: Plan, attempt: Path) -> int:
    """One rank, in this process: no launcher, no process group, no start-up cost."""
    from paddle_dp.launch.worker import guarded, work

    job = plan.job
    _announce(plan, dict(os.environ), attempt)
    with watched_inside(plan.limits, attempt, lambda failure: _answer(failure, plan, attempt, None)):
        failure = guarded(lambda: work(job.entry_point, job.recipe, job.all_overrides, job.options), attempt)
    return _answer(failure, plan, attempt, None)


def _together(plan: Plan, attempt: Path, inherited: dict[str, str]) -> int:
    """Several ranks, or several nodes, by Paddle's launcher under supervision."""
    job = plan.job
    meeting = meet(job.master, job.node_rank == 0) if job.master is not None and plan.nodes > 1 else None
    variables = environment(plan, inherited, meeting)
    screen = _screen(plan, variables)
    _announce(plan, variables, attempt)
    outcome, supervision, signals = watched(argv(plan, attempt, meeting), plan, attempt, variables, screen)
    if isinstance(outcome, Failure):
        return _answer(outcome, plan, attempt, supervision.log_of(outcome.rank), supervision.consequences)
    if outcome > 128 and signals.number:
        _end(f"ended by {signals.name}: no process is left.", plan, attempt)
    elif outcome:
        log = attempt / "launcher.log"
        _end(f"{logs.tail(log, 12)}\nthe launcher ended with {outcome}: {log}", plan, attempt)
    return outcome


def watched(
    command: Sequence[str],
    plan: Plan,
    attempt: Path,
    variables: dict[str, str],
    screen: BinaryIO | None = None,
    stalled: Callable[[], bool] = lambda: False,
) -> tuple[Failure | int, Supervision, Signals]:
    """Runs the launcher's `command` under supervision; returns its exit status, or the failure that ended it.

    Rank 0's output goes to `screen`. The job is also ended when `stalled()` is true, and by a signal, which is in the
    third value. Afterwards none of its processes is left.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    with (
        reserved_ports() as ports,
        Signals() as signals,
        board_of(plan) as board,
        (attempt / "launcher.log").open("wb") as log,
    ):
        process = Popen(
            command,
            env={**ports, **variables, **(board.variables if board else {}), MARK: mark},
            stdin=DEVNULL,
            stdout=log,
            stderr=STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which then ends the ranks in order
            preexec_fn=tied_to(os.getpid()),  # noqa: PLW1509 - prctl and getppid only; a kill -9 of us must end it
        )
        supervision = Supervision(plan, process, attempt, mark, stalled, board)
        outcome = supervision.wait(signals, logs.Follower(logs.worker_log(attempt, 0), screen))
    return outcome, supervision, signals


def _screen(plan: Plan, variables: dict[str, str]) -> BinaryIO | None:
    """Where to copy rank 0's output. On a terminal rank 0 draws itself, and this process writes nothing."""
    variables.pop("PADDLE_DP_TTY", None)
    if plan.job.quiet:
        return None
    if sys.stdout.isatty() and not plan.job.node_rank:
        variables["PADDLE_DP_TTY"] = os.ttyname(sys.stdout.fileno())
        return None
    sys.stdout.flush()
    return sys.stdout.buffer if isinstance(sys.stdout, io.TextIOWrapper) else None


def _answer(
    failure: Failure | None, plan: Plan, attempt: Path, log: Path | None, consequences: Sequence[Failure] = ()
) -> int:
    """Shows the failure, and how to resume, last on the screen; returns its exit status."""
    if failure is None:
        return 0
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")  # an interrupted progress bar has left the cursor hidden
        sys.stdout.flush()
    text = failures.describe(failure, plan.ranks * plan.nodes, log, plan.nodes, consequences)
    if failure.exit_status == UsageError.exit_status:  # it needs another command line, not a resume
        _say(text)
    else:
        _end(text, plan, attempt)
    return failure.exit_status


def _end(text: str, plan: Plan, attempt: Path) -> None:
    """Shows why the job ended, and how to resume it."""
    from paddle_dp.launch.resume import how_to_resume  # imports NumPy, which few jobs need here

    _say("\n".join(filter(None, [text, how_to_resume(plan.job, attempt.parent.parent, plan.began)])))


def _say(text: str) -> None:
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)
