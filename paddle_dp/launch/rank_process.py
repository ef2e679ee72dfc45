"""The beginning and the end of a rank's process, of a recipe, a script, an audit or an examination of a machine."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import NoReturn

from paddle_dp.launch import privately, stacks
from paddle_dp.launch.failures import Failure
from paddle_dp.launch.processes import alive, die_with_parent
from paddle_dp.mesh.environment import Environment
from paddle_dp.mesh.heartbeat import heartbeat, join_board

CLOSING = 5  # seconds for a failed rank to close its files


def become_rank() -> tuple[int, Path | None]:
    """Ties this process to its supervisor, which can then read its phases and stacks, and completes its environment.

    Returns its rank, and the folder of its logs if there is one.
    """
    die_with_parent()
    if not alive(int(os.environ["PADDLE_DP_JOB"].partition("-")[0])):
        sys.exit(1)  # the supervisor ended while this process started, before die_with_parent()
    privately.take()
    rank, folder = Environment.read().rank, log_folder()
    if folder is not None:
        stacks.offer(folder, rank)
    join_board()
    return rank, folder


def log_folder() -> Path | None:
    """Returns the folder in which the launcher keeps the ranks' logs."""
    folder = os.environ.get("PADDLE_LOG_DIR", "")
    return Path(folder) if os.path.isdir(folder) else None


def leave(failure: Failure | None, shown: str = "") -> NoReturn:
    """Ends this rank, which is done, or has a failure: prints `shown` then."""
    sys.stdout.flush()
    if failure is None:
        join_board()
        heartbeat.enter("done")
        sys.exit(0)
    print(shown, file=sys.stderr, flush=True)
    # Python closes open files, but a thread that waits for lost peers must not keep this process alive.
    faulthandler.dump_traceback_later(CLOSING, exit=True)
    sys.exit(failure.exit_status)


def is_well(error: BaseException | None) -> bool:
    """True if a rank that has raised this is done: sys.exit(0) is no failure."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
