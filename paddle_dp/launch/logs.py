"""Where a job's processes write: a private, fresh folder per attempt, and rank 0's words on the screen as they come."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from paddle_dp.errors import UsageError

_ATTEMPT = re.compile(r"attempt-(\d+)")


def fresh(run: Path) -> Path:
    """Makes and returns `<run>/logs/attempt-001` (or the next number), readable by its owner only.

    The launcher writes whole environments there, with whatever secrets they hold. Raises UsageError when the folder
    cannot be made, and then leaves nothing behind.
    """
    made: list[Path] = []
    try:
        for folder in reversed([run / "logs", *(run / "logs").parents]):
            if not folder.exists():
                folder.mkdir(exist_ok=True)
                made.append(folder)
        (run / "logs").chmod(0o700)
        return _next_attempt(run / "logs")
    except OSError as error:
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()
        raise UsageError(
            f"{run} cannot be written ({error.strerror}): choose another folder with --out DIR."
        ) from error


def _next_attempt(logs: Path) -> Path:
    numbers = [int(found[1]) for path in logs.iterdir() if (found := _ATTEMPT.fullmatch(path.name))]
    number = max(numbers, default=0) + 1
    while True:
        folder = logs / f"attempt-{number:03d}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:  # another job in the same run folder was quicker
            number += 1
        else:
            return folder


def worker_log(attempt: Path, local_rank: int) -> Path:
    """Where the launcher puts what a rank prints; it counts the ranks of its own node."""
    return attempt / f"workerlog.{local_rank}"


def tail(log: Path, lines: int = 30) -> str:
    """The last `lines` lines of a log, or "" when there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 200 * lines))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


class Follower:
    """Copies what is appended to `log` to `screen`, in whole lines, from wherever it left off."""

    def __init__(self, log: Path, screen: BinaryIO | None):
        self.log, self.screen = log, screen
        self._read = 0
        self._rest = b""

    def copy(self, last: bool = False) -> None:
        """Copies what is new; `last` also copies a line that has no end yet."""
        if self.screen is None:
            return
        try:
            with self.log.open("rb") as file:
                file.seek(self._read)
                new = file.read()
        except FileNotFoundError:
            return
        self._read += len(new)
        whole, end, self._rest = (self._rest + new).rpartition(b"\n")
        self._show(whole + end + (self._rest if last else b""))

    def _show(self, text: bytes) -> None:
        if not text or self.screen is None:
            return
        try:
            self.screen.write(_without_noise(text))
            self.screen.flush()
        except OSError:  # the reader of a pipe has gone; the training is worth more than its screen
            self.screen = None


# What init_parallel_env says of every flag that the launcher itself has set.
_NOISE = re.compile(rb"=+ Modified FLAGS detected =+\n(?:FLAGS\(.*\n)*=+\n")


def _without_noise(text: bytes) -> bytes:
    return _NOISE.sub(b"", text)
