"""Watches a job of one rank, which has no supervisor, from a thread of the rank's process."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from paddle_dp.launch import stacks
from paddle_dp.launch.command import Limits
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.standstill import STATUS, Standing
from paddle_dp.mesh.heartbeat import StatusTable, heartbeat

INTERVAL = 0.5  # seconds between two looks
DEBUGGERS = {"bdb", "pdb", "pudb", "ipdb", "IPython", "code", "debugpy", "pydevd", "_pydevd_bundle"}


@contextmanager
def watched_inside(limits: Limits | None, attempt: Path, show: Callable[[Failure], object]) -> Iterator[None]:
    """Ends a rank that stands still within the context: calls `show` with the failure, and exits with 124.

    C code that holds the interpreter stops this thread, too, and is not found. A rank in a debugger may stand still.
    """
    board = None if limits is None else _board()
    if limits is None or board is None:
        yield
        return
    board.give(heartbeat)
    over, rank = threading.Event(), threading.get_ident()

    def look() -> None:
        standing = Standing(limits)
        while not over.wait(INTERVAL):
            if in_debugger(rank):
                standing = Standing(limits)
            elif standstill := standing.look({0: board.read(0)}, time.monotonic()):
                show(_failure(str(standstill), attempt))
                os._exit(STATUS)

    thread = threading.Thread(target=look, name="standstill", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        heartbeat.detach()
        board.close()


def in_debugger(thread: int) -> bool:
    """True if a thread of this process is in a debugger, as at its prompt."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _board() -> StatusTable | None:
    try:
        return StatusTable(1)
    except OSError:  # not Linux
        return None


def _failure(message: str, attempt: Path) -> Failure:
    path = stacks.stack_file(attempt, 0)
    try:
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        stack = stacks.standing_in(path.read_text(errors="replace"))
        message += f"\nthe innermost call first:\n{stacks.shown(stack)}\nstacks of all threads: {path}"
    except OSError as error:  # a full disk
        message += f"\n(its stacks could not be written to {path}: {error})"
    return Failure(rank=0, kind="stood still", message=message, exit_status=STATUS, expected=True)
