"""Another user of this machine: a process with a uid of its own, which takes root to start."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

NOBODY = 65534
needs_another_user = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can start a process of another user, and none other is a stranger"
)


def as_stranger(work: Callable[[], object]) -> int:
    """Starts a process of uid 65534 that does `work`, and returns its pid; it ends with 0 if nothing was raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - a fork must not run pytest's own code
        traceback.print_exc()
    finally:
        os._exit(status)


def stranger_is_well(work: Callable[[], object]) -> bool:
    """Whether a stranger does `work` without an exception."""
    return os.waitpid(as_stranger(work), 0)[1] == 0
