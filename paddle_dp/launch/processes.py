"""Who descends from whom on this machine, and how a whole family of processes is ended.

Paddle's launcher gives each worker a session of its own, so killing a process group would miss the workers:
the tree is read from /proc instead. Where there is no /proc (macOS) only the root itself is ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(sign: int = signal.SIGKILL) -> None:
    """The kernel sends this process `sign` as soon as the thread that started it is gone (Linux only).

    A parent that was gone before the call is not noticed by the kernel: callers who know their parent compare
    `os.getppid()` afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, sign)


def adopt_orphans() -> None:
    """Makes descendants whose parents die children of this process, so that none can slip out of its tree."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):  # not Linux: peers still end through the launcher's own watch
        pass


def state_and_parent(pid: int) -> tuple[str, int] | None:
    """The process's state letter (R, S, D, Z, …) and its parent's pid, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent = text[text.rindex(")") + 2 :].split()[:2]
    return state, int(parent)


def alive(pid: int) -> bool:
    """Whether `pid` is running (a zombie, dead but not yet waited for, is not)."""
    found = state_and_parent(pid)
    return found is not None and found[0] not in "ZX"


def descendants(root: int) -> list[int]:
    """The living processes that descend from `root`, nearest first, without `root` itself."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        found = state_and_parent(int(entry.name))
        if found and found[0] not in "ZX":
            children.setdefault(found[1], []).append(int(entry.name))
    family = list(children.get(root, []))
    for pid in family:  # grows while it is walked: breadth first
        family.extend(children.get(pid, []))
    return family


def send(pids: Iterable[int], sign: int) -> None:
    """Sends `sign` to each of `pids` that still exists."""
    for pid in pids:
        try:
            os.kill(pid, sign)
        except (ProcessLookupError, PermissionError):
            pass


def end_family(root: int, patience: float, *, polite: int = signal.SIGTERM) -> None:
    """Ends all that descends from `root`: `polite` first, SIGKILL for what is left after `patience` seconds."""
    family = descendants(root)
    send(family, polite)
    deadline = time.monotonic() + patience
    while family and time.monotonic() < deadline:
        time.sleep(0.02)
        family = descendants(root)
    deadline = time.monotonic() + 5.0  # a process in uninterruptible sleep cannot be waited for for ever
    while family and time.monotonic() < deadline:
        send(family, signal.SIGKILL)
        time.sleep(0.02)
        family = descendants(root)
