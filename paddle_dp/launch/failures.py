"""Failures of ranks: each rank writes its failure to a file, and the first cause is chosen from them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from paddle_dp import errors
from paddle_dp.errors import LostPeerError, PaddleDPError, StoppedError, UsageError, clipped, message_of
from paddle_dp.files import replacing
from paddle_dp.mesh.heartbeat import heartbeat

KERNEL = "by the kernel: memory ran out (a smaller train.batch, fewer ranks or loader.num_workers need less)"
NOT_KERNEL = "by a person or another program: memory had not run out"
TRACEBACK = "traceback.rank-{}.txt"  # in an attempt's folder: all frames, if the screen shows only a user's
MAX_LIBRARY_FRAMES = 4  # a traceback with fewer frames of libraries is shown completely
MAX_CONSEQUENCES, MAX_LINE_CHARS = 8, 140  # consequences that are shown, and characters of each
LOST_NODE = "lost node"  # the kind of a failure that no rank has written, as its machine is gone
# Kinds of failures that do not belong to one rank.
JOB_FAILURE_KINDS = ("stood still", "launcher", LOST_NODE, StoppedError.__name__)
# An error of this package in the backward of a PyLayer, or in a gradient's hook: Paddle converts it, and puts Python's
# and C++'s frames into the message.
_IN_BACKWARD = re.compile(
    r"(?:Error message in backward of .*\n\s*|\(External\) )(?P<kind>\w+): (?P<message>[^\n]*)"
)
# Messages of ranks that lost a peer: such a failure is the cause only if all failures are such.
_CONSEQUENCE = re.compile(r"(?i)gloo|nccl|tcp_?store|unhandled system error|did not open its store")
_LOST_LINK = re.compile(r"(?i)connection (?:closed|reset|refused)|broken pipe")
# Paddle raises these then. Python and libraries of HTTP have kinds of their own, such as ConnectionError and URLError.
_PADDLE_KINDS = ("RuntimeError", "OSError", "ValueError", "SystemError")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's failure. `kind`: the name of the exception or signal. `time`: seconds since 1970.

    `expected`: a PaddleDPError, whose message suffices. `printed`: bytes in this rank's log before the failure.
    `outside`: the cause was outside the job, so a repetition may succeed. `waited`: the rank's line about late ranks,
    if a lost peer may have ended it. `where`: its phase when a signal ended it, " in forward of step 7", or "". `name`:
    its role, "server 1", or "". `frames`: the complete traceback, if `traceback` omits frames.
    """

    rank: int
    kind: str
    message: str
    exit_status: int = 1
    traceback: str = ""
    expected: bool = False
    printed: int = 0
    outside: bool = False
    waited: str = ""
    where: str = ""
    name: str = ""
    frames: str = ""
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)

    @classmethod
    def recorded(cls, error: BaseException, rank: int, folder: Path | None) -> Failure:
        """Makes the failure for `error`, as `from_error`, and writes it to `folder` if there is one."""
        failure = cls.from_error(error, rank)
        if folder is not None:
            failure.write(folder)
        return failure

    @classmethod
    def from_error(cls, error: BaseException, rank: int) -> Failure:
        """Makes the failure for `error`, caught in this process; its traceback omits the frames of `launch`.

        An error of this package that Paddle converted in backward gets its first kind and message.
        """
        frames = error.__traceback__
        while frames and Path(frames.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            frames = frames.tb_next
        text = clipped("".join(traceback.format_exception(type(error), error, frames or error.__traceback__)))
        kind, message, status = type(error).__name__, message_of(error), 1
        expected = isinstance(error, PaddleDPError | KeyboardInterrupt)
        if isinstance(error, PaddleDPError):
            status = error.exit_status
        elif within := _IN_BACKWARD.search(message):
            origin = getattr(errors, within["kind"], None)
            if isinstance(origin, type) and issubclass(origin, PaddleDPError):
                kind, message, status, expected = within["kind"], within["message"], origin.exit_status, True
        frames_left_out = ""
        if expected and error.__cause__ is not None:
            frames_left_out = text
        elif not expected and (short := _user_traceback(error, rank)):
            frames_left_out, text = text, short
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else 1
            message = f"sys.exit({error.code!r})"
        if isinstance(error, KeyboardInterrupt):
            message, status = str(error) or "interrupted.", 130
        return cls(
            rank=rank, kind=kind, message=message, exit_status=status, traceback=text, expected=expected,
            printed=os.fstat(2).st_size, name=heartbeat.name, frames=frames_left_out,
        )  # fmt: skip

    @classmethod
    def by_signal(
        cls, rank: int, pid: int, number: int, ended_at: float, log: str = "", location: str = ""
    ) -> Failure:
        """Makes the failure of a rank that a signal ended, with the end of its log in place of a traceback."""
        known = {s.value for s in signal.Signals}
        name = signal.Signals(number).name if number in known else f"signal {number}"
        hints = {
            "SIGKILL": ", by hand or by the kernel when memory runs out (dmesg has the cause)",
            "SIGBUS": ", often a full /dev/shm, or a file that was cut short while it was mapped into memory",
        }
        return cls(
            rank=rank, kind=name, message=f"ended by {name}{location}{hints.get(name, '')}", exit_status=128 + number,
            traceback=log, where=location, pid=pid, time=ended_at,
        )  # fmt: skip

    def with_kernel(self, kernel_ended_process: bool | None) -> Failure:
        """Returns the failure; after a SIGKILL its message names the sender, the kernel or another program.

        `kernel_ended_process`: the kernel has just ended a process because memory ran out; None: unknown.
        """
        if self.kind != "SIGKILL" or kernel_ended_process is None:
            return self
        message = f"ended by SIGKILL{self.where}, {KERNEL if kernel_ended_process else NOT_KERNEL}"
        return replace(self, message=message, outside=not kernel_ended_process)

    @property
    def consequence(self) -> bool:
        """True if it looks like the failure of a rank that lost a peer."""
        if self.kind in ("SIGABRT", "SIGTERM", LostPeerError.__name__):
            return True
        lost = self.kind in _PADDLE_KINDS and _LOST_LINK.search(self.message)
        return not self.expected and bool(lost or _CONSEQUENCE.search(self.message))

    @property
    def ended_without_error(self) -> bool:
        """True if the rank raised no error: a signal ended it, or it left early. Its message says how it ended."""
        return self.kind.startswith(("SIG", "signal", "left"))

    @property
    def is_usage_error(self) -> bool:
        """True if another command line or recipe would avoid it."""
        return self.expected and self.exit_status == UsageError.exit_status

    @property
    def rank_name(self) -> str:
        """ "rank 1", or "server 1 (rank 1)"."""
        return f"{self.name} (rank {self.rank})" if self.name else f"rank {self.rank}"

    @property
    def in_short(self) -> str:
        """One line: the kind and the beginning of the message."""
        kind, message = self.kind, self.message
        if within := _IN_BACKWARD.search(message):
            kind, message = within["kind"], within["message"]
        line = " ".join(message.split())
        line = line if self.ended_without_error else f"{kind}: {line}"
        return line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS - 1]}…"

    def write(self, folder: Path) -> None:
        """Writes this failure to `folder` for the supervisor, complete or nothing. Does not raise on a full disk."""
        try:
            folder.mkdir(parents=True, exist_ok=True)  # it may have been deleted with the run's folder
            with replacing(folder / f"failure.rank-{self.rank}.json") as partial:
                partial.write_text(json.dumps(asdict(self), indent=1))
                if self.frames:
                    (folder / TRACEBACK.format(self.rank)).write_text(self.frames)
        except OSError as error:
            print(f"(this failure could not be written to {folder}: {error})", flush=True)


def _user_traceback(error: BaseException, rank: int) -> str:
    """Returns the traceback with only the user's frames.

    Returns "" if it has no user's frame, or fewer than MAX_LIBRARY_FRAMES others.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    user_frames = [(frame, line) for frame, line in frames if not _is_library(frame.f_globals)]
    omitted = len(frames) - len(user_frames)
    if not user_frames or omitted < MAX_LIBRARY_FRAMES or isinstance(error, SyntaxError):
        return ""
    listed = traceback.StackSummary.extract(iter(user_frames)).format()
    rest = f"({omitted} frames of paddle_dp and of libraries: {TRACEBACK.format(rank)}, next to the log)\n"
    named = traceback.format_exception_only(type(error), error)
    return clipped("".join(["Traceback (most recent call last):\n", *listed, *named, rest]))


def _is_library(variables: Mapping[str, Any]) -> bool:
    """True if a module with these variables is no code of the user."""
    module = str(variables.get("__name__", ""))
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return module.partition(".")[0] in ("paddle_dp", *sys.stdlib_module_names) or "site-packages" in file


def read_all(folder: Path) -> list[Failure]:
    """Reads the failures that ranks have written to `folder`."""
    return [Failure(**json.loads(path.read_text())) for path in folder.glob("failure.rank-*.json")]


def first(failures: Iterable[Failure]) -> Failure | None:
    """Returns the first cause: the earliest failure of a rank that did not lose a peer, else the earliest failure."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time), default=None)


def is_on_all_ranks(failure: Failure, ranks: int, consequences: Iterable[Failure]) -> bool:
    """True if all of several ranks ended with the same error, so that none of them caused the others'."""
    error = (failure.kind, failure.message)
    alike = {other.rank for other in consequences if (other.kind, other.message) == error}
    return len(alike | {failure.rank}) == ranks > 1


def in_a_line(failure: Failure, ranks: int, consequences: Iterable[Failure] = ()) -> str:
    """Returns "rank 1 of 2 on host: ValueError: …" or "all 2 ranks: …"; for a job's failure, its first line."""
    if failure.kind in JOB_FAILURE_KINDS:
        return failure.message.partition("\n")[0].rstrip(".")
    if is_on_all_ranks(failure, ranks, consequences):
        return f"all {ranks} ranks: {failure.in_short}"
    return f"{failure.rank_name} of {ranks} on {failure.host}: {failure.in_short}"


def describe(
    failure: Failure, ranks: int, log: Path | None, nodes: int = 1, consequences: Sequence[Failure] = ()
) -> str:
    """Returns the last lines on the screen: message or traceback, rank and host, consequences in other ranks, and the
    log.

    An error that another command line or recipe would avoid has only its message. If all ranks raised the same error,
    none is named.
    """
    if failure.is_usage_error or (failure.expected and failure.kind in JOB_FAILURE_KINDS):
        return failure.message
    lines = [failure.message if failure.expected else failure.traceback.rstrip()]
    how = f": {failure.message}" if failure.ended_without_error else ""
    alike = is_on_all_ranks(failure, ranks, consequences)
    if alike:
        lines.append(f"all {ranks} ranks{how or ' ended with it'}")
    elif ranks > 1 or how:
        failed_rank = f"{failure.rank_name} of {ranks} on {failure.host}"
        lines.append(f"{failed_rank} failed{' first' * (ranks > 1)}{how}")
    if failure.consequence and ranks > 1 and not alike:
        if failure.waited:
            line = f"It lost a peer. Before, it printed: {failure.waited}."
            lines.append(f"{line} See that rank's log, next to its own.")
        else:
            sources = "nodes' screens and logs" if nodes > 1 else "ranks' logs, next to its own,"
            lines.append(f"It lost a peer: look at the other {sources} for the cause.")
    later = [] if alike else [other for other in consequences if other.rank != failure.rank]
    lines += [f"then {other.rank_name}: {other.in_short}" for other in later[:MAX_CONSEQUENCES]]
    lines.append(f"then {len(later) - MAX_CONSEQUENCES} more" if len(later) > MAX_CONSEQUENCES else "")
    if log is not None:
        lines.append(f"log: {log}")
    return "\n".join(filter(None, lines))
