"""Prints a job's lines: at its start, before a restart, and last why it ended and how to resume it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paddle_dp.launch import failures, logs
from paddle_dp.launch.command import LaunchPlan, headline
from paddle_dp.launch.restarts import AttemptResult, Restart
from paddle_dp.plan.goodput import read_goodput
from paddle_dp.text import numbered, plural


def announce(plan: LaunchPlan, variables: dict[str, str], attempt: Path) -> None:
    """Prints the line at a job's beginning."""
    if not plan.job.quiet:
        print(headline(plan, variables, attempt.parent.parent), flush=True)


def show_end(result: AttemptResult, plan: LaunchPlan, why: str = "") -> int:
    """Shows why a job ended, and how to resume it, last on the screen; returns its exit status.

    `why`: the reason for no restart.
    """
    if (cause := result.cause) is not None:
        _show_cursor()
        text = failures.describe(cause, plan.all_ranks, result.log, plan.nodes, result.consequences)
        if cause.is_usage_error:  # not a resume
            write(text)
        else:
            end("\n".join(filter(None, [text, why])), plan, result.attempt)
        return cause.exit_status
    if result.signal and result.status > 128:
        end(f"ended by {result.signal}: no process is left.", plan, result.attempt)
    elif result.status:
        log = result.attempt / "launcher.log"
        text = f"{logs.tail(log, 12)}\nthe launcher ended with {result.status}: {log}\n{why}"
        end(text, plan, result.attempt)
    return result.status


def show_restart(result: AttemptResult, plan: LaunchPlan, then: Restart, label: str) -> None:
    """Prints two lines: why an attempt ended, and from where the next one starts."""
    _show_cursor()
    if result.cause is None:
        cause = f"Paddle's launcher ended with {result.status}"
    else:
        cause = failures.in_a_line(result.cause, plan.all_ranks, result.consequences)
    budget = f"restart {then.number} of {plan.job.restarts}"
    if not plan.job.script:
        budget += "; the count starts over after each new checkpoint"
    write(
        f"{result.attempt.name} failed: {cause.rstrip('.')}. Log: {result.log or result.attempt}\n"
        f"starts again from {label} in {then.wait:.0f} s ({budget})"
    )


def resized(plan: LaunchPlan, label: str, nodes: Sequence[int] = ()) -> None:
    """Prints where an attempt begins that may have another number of ranks, and their number and `nodes`."""
    on = f" of {numbered('node', nodes)}" if nodes else ""
    write(f"goes on from {label} on {plural(plan.all_ranks, 'rank')}{on}")


def end(text: str, plan: LaunchPlan, attempt: Path) -> None:
    """Shows why the job ended, the goodput of a run that was restarted, and how to resume it."""
    from paddle_dp.launch.resume import how_to_resume  # imports NumPy, which few jobs need here

    folder = attempt.parent.parent
    goodput = read_goodput(folder)
    lines = [text.rstrip(), str(goodput or ""), how_to_resume(plan.job, folder, plan.began)]
    write("\n".join(filter(None, lines)))


def write(text: str) -> None:
    """Prints to standard error, after all earlier output."""
    sys.stdout.flush()
    print(text, file=sys.stderr, flush=True)


def _show_cursor() -> None:
    """Shows the cursor, which an interrupted progress bar leaves hidden."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")
        sys.stdout.flush()
