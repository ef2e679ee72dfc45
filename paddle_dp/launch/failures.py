"""Why a job failed: what each rank wrote down of its own end, and which of them was the first cause."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paddle_dp.errors import PaddleDPError

# How a lost peer shows in the others: never the cause while any other failure is known.
_CONSEQUENCE = re.compile(
    r"gloo|nccl|connection (?:closed|reset|refused)|broken pipe|tcp_?store|unhandled system error"
    r"|did not open its store",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One rank's end. `kind` is the exception's or the signal's name; `time` is seconds since 1970.

    `expected` failures are raised on purpose (PaddleDPError): their message says it all. `printed` is how many bytes
    this rank's log held before; `waited`, whom it said that it waited for, if a lost peer may have ended it.
    """

    rank: int
    kind: str
    message: str
    exit_status: int = 1
    traceback: str = ""
    expected: bool = False
    printed: int = 0
    waited: str = ""
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)
    time: float = field(default_factory=time.time)

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Failure:
        """What `error`, caught in this process, has to say; frames of this package are left out."""
        below = error.__traceback__
        while below and Path(below.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            below = below.tb_next
        words = "".join(traceback.format_exception(type(error), error, below or error.__traceback__))
        message, status = str(error), getattr(error, "exit_status", 1)
        if isinstance(error, SystemExit):
            status = error.code if isinstance(error.code, int) else 1
            message = f"sys.exit({error.code!r})"
        if isinstance(error, KeyboardInterrupt):
            message, status = "interrupted.", 130
        return cls(
            rank=rank, kind=type(error).__name__, message=message, exit_status=status, traceback=words,
            expected=isinstance(error, PaddleDPError | KeyboardInterrupt),
            printed=os.fstat(2).st_size,
        )  # fmt: skip

    @classmethod
    def by_signal(cls, rank: int, pid: int, number: int, seen: float, log: str) -> Failure:
        """A rank that the kernel ended; the end of its log stands for a traceback."""
        name = (
            signal.Signals(number).name if number in {s.value for s in signal.Signals} else f"signal {number}"
        )
        hints = {
            "SIGKILL": ", by hand or by the kernel when memory runs out (dmesg says which)",
            "SIGBUS": ", often a full /dev/shm",
        }
        return cls(
            rank=rank, kind=name, message=f"was ended by {name}{hints.get(name, '')}", exit_status=128 + number,
            traceback=log, pid=pid, time=seen,
        )  # fmt: skip

    @property
    def consequence(self) -> bool:
        """Whether this looks like what happens to a rank whose peer is gone."""
        if self.kind in ("SIGABRT", "SIGTERM"):
            return True
        return not self.expected and bool(_CONSEQUENCE.search(self.message))

    def write(self, folder: Path) -> None:
        """Leaves this failure in `folder` for the supervisor: whole or not at all. Never raises for a full disk."""
        partial = folder / f".failure.rank-{self.rank}.{os.getpid()}"
        try:
            partial.write_text(json.dumps(asdict(self), indent=1))
            partial.replace(folder / f"failure.rank-{self.rank}.json")
        except OSError as error:
            print(f"(this failure could not be written to {folder}: {error})", flush=True)


def read_all(folder: Path) -> list[Failure]:
    """The failures that ranks have left in `folder`."""
    return [Failure(**json.loads(path.read_text())) for path in folder.glob("failure.rank-*.json")]


def first(failures: Iterable[Failure]) -> Failure | None:
    """The failure that the others follow from: the earliest that is not a lost peer's echo, else the earliest."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time), default=None)


def describe(failure: Failure, ranks: int, log: Path | None, nodes: int = 1) -> str:
    """What the screen ends with: the failure's own words, then its rank, its host and its log.

    What was raised on purpose is shown as its message alone when the person at the keyboard can mend it.
    """
    if failure.expected and failure.exit_status == 2:
        return failure.message
    lines = [failure.message if failure.expected else failure.traceback.rstrip()]
    said = f": {failure.message}" if failure.kind.startswith(("SIG", "signal", "left")) else ""
    lines.append(f"rank {failure.rank} of {ranks} on {failure.host} failed first{said}" if ranks > 1 else "")
    if failure.consequence and ranks > 1:
        if failure.waited:
            lines.append(
                f"It lost a peer. Before, it said: {failure.waited}. See that rank's log, beside its own."
            )
        else:
            others = "nodes' screens and logs" if nodes > 1 else "ranks' logs, beside its own,"
            lines.append(f"It lost a peer: look at the other {others} for the cause.")
    if log is not None and ranks > 1:
        lines.append(f"log: {log}")
    return "\n".join(filter(None, lines))
