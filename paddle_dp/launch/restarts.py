"""Decides if and when a failed job starts again, only from the results of its attempts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from paddle_dp.errors import LostFolderError, StoppedError, UsageError
from paddle_dp.launch.command import LaunchPlan
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.processes import END_SIGNALS
from paddle_dp.text import times

# Seconds before a restart: 1, 2, 4, … up to a minute. The first one after a kill from outside is made at once, as there
# is nothing to wait for.
FIRST_WAIT, MAX_WAIT = 1.0, 60.0
SAME = 3  # equal failures at one step that are no accident
_STOPPED = ("KeyboardInterrupt", StoppedError.__name__, LostFolderError.__name__)
_FINAL = {*_STOPPED, *(number.name for number in END_SIGNALS)}


@dataclass(frozen=True, kw_only=True)
class AttemptResult:
    """The result of one attempt. `cause`: the failure that ended it; None if it is done, was ended by a signal
    (`signal`: its name), or Paddle's launcher ended by itself.

    `step`: updates done by the rank that failed first, `began` of them by earlier attempts. `saved`: the step of the
    newest complete and good checkpoint, or None. `plan`: this node's part of the attempt.
    """

    attempt: Path
    status: int
    cause: Failure | None = None
    consequences: Sequence[Failure] = ()
    log: Path | None = None
    signal: str = ""
    step: int = 0
    began: int = 0
    saved: int | None = None
    plan: LaunchPlan | None = None

    @property
    def progressed(self) -> bool:
        """True if the attempt has saved a checkpoint of a later step than `began`."""
        return self.saved is not None and self.saved > self.began

    @property
    def stopped(self) -> bool:
        """True if the training has stopped in good order, with a checkpoint, because it was asked to."""
        return self.cause is not None and self.cause.kind == StoppedError.__name__

    @property
    def final(self) -> bool:
        """True if another attempt makes no sense: it is done, was asked to end, has lost its folder, or was refused
        for a usage error."""
        cause = self.cause
        if self.status == 0 or self.signal:
            return True
        if cause is None:
            return self.status == UsageError.exit_status
        return cause.kind in _FINAL or cause.is_usage_error

    @property
    def outside(self) -> bool:
        """True if the cause was outside the job, so that a repetition does not count against the training."""
        return self.cause is not None and self.cause.outside

    @property
    def culprit(self) -> int | None:
        """The rank that failed; None if another one raised the same error, which any of them may do first, or Paddle's
        launcher ended."""
        cause = self.cause
        if cause is None or cause.kind == "launcher":
            return None
        return None if any(alike(cause, other) for other in self.consequences) else cause.rank

    @property
    def signature(self) -> tuple[object, ...]:
        """A key that is equal for equal failures at one step."""
        return self.step, self.status, self.culprit, self.cause and _error_of(self.cause)


def _error_of(failure: Failure) -> tuple[str, str]:
    """Returns kind and message: numbers in it, such as pids and devices, do not count, nor who stood still."""
    message = "" if failure.kind == "stood still" else re.sub(r"0x[0-9a-f]+|\d+", "#", failure.message)
    return failure.kind, message


def alike(failure: Failure, other: Failure) -> bool:
    """True if both are the same error. The other's message may lack its beginning, as of another node."""
    (kind, message), (other_kind, end) = _error_of(failure), _error_of(other)
    return kind == other_kind and message.endswith(end)


@dataclass(frozen=True, kw_only=True)
class Restart:
    """The decision to start again after `wait` seconds, as restart `number` of the budget."""

    wait: float
    number: int


def decide(history: Sequence[AttemptResult], restarts: int, script: bool = False) -> Restart | str:
    """Decides on a restart after the last attempt of `history`; allows `restarts` in a row without a new checkpoint.
    Returns the restart, or the sentence why there is none, "" if it needs no explanation.

    An attempt that saves a checkpoint of a later step resets the budget and the wait. The checkpoints of a `script` are
    not known, and without a Trainer its steps are not: they are 0.
    """
    last = history[-1]
    if last.final or not restarts:
        return ""
    progress = [number for number, result in enumerate(history) if result.progressed]
    failures = history[progress[-1] if progress else 0 :]  # since the last new checkpoint, oldest first
    newest_first = reversed(failures)
    alike = takewhile(lambda end: end.signature == last.signature and not end.outside, newest_first)
    same = 0 if script and not last.step else len(list(alike))
    if same >= SAME or (same == len(failures) > max(1, restarts)):
        where = f"after step {last.step}" if last.step else "before the first step was done"
        repeated = (
            f"the same failure {times(same)} {where}{', with no new checkpoint in between' * (not script)}"
        )
        return f"not started again: {repeated}."
    if len(failures) > restarts:
        spent = "the restart was" if restarts == 1 else f"{restarts} restarts were"
        return f"not started again: {spent} spent{' without a new checkpoint' * (not script)}."
    number = len(failures)
    wait = 0.0 if number == 1 and last.outside else min(MAX_WAIT, FIRST_WAIT * 2 ** (number - 1))
    return Restart(wait=wait, number=number)
