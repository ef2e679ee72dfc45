"""Logs of a job's processes: a private folder per attempt; rank 0's log is copied to the screen as it grows."""

from __future__ import annotations

import os
import re
import select
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from paddle_dp.errors import UsageError

PIECE = 4096  # bytes that a pipe takes without a wait if it takes any
_ATTEMPT = re.compile(r"attempt-(\d+)")
# The output of init_parallel_env for every flag that the launcher has set, and Paddle's output for a SIGTERM.
_NOISE = re.compile(
    rb"=+ Modified FLAGS detected =+\n(?:FLAGS\(.*\n)*=+\n"
    rb"|(?m:^)\n*-{38}\nC\+\+ Traceback \(most recent call last\):\n-{38}\n(?:(?!FatalError).*\n)*"
    rb"FatalError: `Termination signal`.*\n(?:  \[.*\n)*"
)
# Its first lines, at the end of the text so far: Paddle writes line by line.
_BEGINNING = re.compile(
    rb"=+ Modified FLAGS detected =+\n(?:FLAGS\(.*\n)*\Z"
    rb"|(?m:^)\n*-{38}\n(?:C\+\+ Traceback \(most recent call last\):\n(?:(?!FatalError).*\n)*"
    rb"(?:FatalError: `Termination signal`.*\n(?:  \[.*\n)*)?)?\Z"
)


def fresh(run: Path) -> Path:
    """Makes and returns `<run>/logs/attempt-001` (or the next number), readable by its owner only.

    Ranks may print private data, so a new run folder is private, too. Raises UsageError if a folder cannot be made,
    after removing new ones.
    """
    created: list[Path] = []
    try:
        for folder in reversed([run / "logs", *(run / "logs").parents]):
            if not folder.exists():
                folder.mkdir(0o700 if folder in (run, run / "logs") else 0o777, exist_ok=True)
                created.append(folder)
        (run / "logs").chmod(0o700)
        return _next_attempt(run / "logs")
    except OSError as error:
        for folder in reversed(created):
            with suppress(OSError):
                folder.rmdir()
        raise UsageError(
            f"{run / 'logs'} cannot be written ({error.strerror}), and logs go there. Make it writable, or work in "
            "another folder: train has --output-dir DIR for that, all else takes a copy of the run."
        ) from error


def _next_attempt(logs: Path) -> Path:
    numbers = [int(match[1]) for path in logs.iterdir() if (match := _ATTEMPT.fullmatch(path.name))]
    number = max(numbers, default=0) + 1
    while True:
        folder = logs / f"attempt-{number:03d}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:  # another job in the same run folder made it just now
            number += 1
        else:
            return folder


def rank_log(attempt: Path, local_rank: int) -> Path:
    """Returns the file of a rank's output, which Paddle names workerlog.N by the rank's number on its node."""
    return attempt / f"workerlog.{local_rank}"


def tail(log: Path, lines: int = 30, since: int = 0) -> str:
    """Returns the last `lines` lines of a log after byte `since`; "" if the log cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(since, os.fstat(file.fileno()).st_size - 200 * lines))
            text = _NOISE.sub(b"", file.read()).decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def last(log: Path, line: re.Pattern[str]) -> str:
    """Returns the last line that matches `line` in a log's last 64 kB, or ""."""
    return (line.findall(tail(log, 320)) or [""])[-1]


def exit_code(attempt: Path, local_rank: int) -> int | None:
    """Returns a rank's exit code, negative for a signal, from the log of Paddle's launcher; None if not logged."""
    codes = re.findall(
        rf"Container rank .* code (-?\d+) log \S*{re.escape(rank_log(attempt, local_rank).name)}\b",
        tail(attempt / "launcher.log", 200),
    )
    return int(codes[-1]) if codes else None


class Follower:
    """Copies new text in `log` to `screen`, in complete lines, without Paddle's output about itself."""

    def __init__(self, log: Path, screen: BinaryIO | None):
        self.log, self.screen = log, screen
        self._read = 0
        self._rest = b""

    @property
    def size(self) -> int:
        """The log's current size in bytes."""
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    @property
    def shown(self) -> int:
        """The bytes of the log that are on the screen."""
        return 0 if self.screen is None else self._read - len(self._rest)

    def follow(self, until: int) -> None:
        """Copies like `copy`, but only as much as the screen takes now: nobody would watch the ranks while a stopped
        reader (Ctrl-S, a pager) makes this process wait."""
        before = -1
        while before < self._read < until and self._takes():
            before = self._read
            self.copy(min(until, before + max(PIECE // 4, PIECE - len(self._rest))))

    def _takes(self) -> bool:
        """True if the screen takes a piece without a wait."""
        if self.screen is None:
            return True
        try:
            return bool(select.select([], [self.screen], [], 0.0)[1])
        except (OSError, ValueError):  # not a file of the system
            return True

    def copy(self, until: int) -> None:
        """Copies new text before byte `until`, up to the end of its last complete line."""
        try:
            with self.log.open("rb") as file:
                file.seek(self._read)
                new = file.read(max(0, until - self._read))
        except FileNotFoundError:
            return
        self._read += len(new)
        complete, end, self._rest = (self._rest + new).rpartition(b"\n")
        text = complete + end
        if begun := _BEGINNING.search(text):
            self._rest, text = text[begun.start() :] + self._rest, text[: begun.start()]
        self._show(text)

    def finish(self) -> None:
        """Copies all remaining text, also an incomplete last line."""
        self.copy(self.size)
        self._show(self._rest)

    def _show(self, text: bytes) -> None:
        if not text or self.screen is None:
            return
        try:
            self.screen.write(_NOISE.sub(b"", text))
            self.screen.flush()
        except OSError:  # the reader of a pipe has gone: the training continues without a screen
            self.screen = None
