"""The process in which `paddle-dp check` tries recipes, as a fork of the command: it need not import Paddle again."""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import SimpleNamespace

from paddle_dp.launch import check_process
from paddle_dp.launch.processes import die_with_parent


def try_in_forks() -> None:
    """From now on this process, which is a test's command, tries recipes in forks."""
    check_process._started = _started  # type: ignore[assignment]


def _started() -> SimpleNamespace:
    from paddle_dp.assembly import first_forward

    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            die_with_parent()
            here.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            sys.stdin, sys.stdout = there.makefile("r"), there.makefile("w")
            first_forward.main()
        finally:
            os._exit(0)
    there.close()

    def communicate() -> None:
        here.close()
        os.waitpid(child, 0)

    return SimpleNamespace(
        stdin=here.makefile("w"), stdout=here.makefile("r"), kill=lambda: os.kill(child, signal.SIGKILL),
        communicate=communicate,
    )  # fmt: skip
