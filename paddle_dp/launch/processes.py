"""Who descends from whom on this machine, how each has ended, and how a whole family of processes is ended.

Paddle's launcher gives each worker a session of its own, so ending a process group would miss the workers: the tree is
read from /proc. Where there is no /proc (macOS) only what the launcher itself does remains.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(sign: int = signal.SIGKILL) -> None:
    """The kernel sends this process `sign` as soon as the thread that started it is gone (Linux only).

    A parent that was gone before the call is not noticed: callers who know their parent compare `os.getppid()` after.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sign, 0, 0, 0)
    except (OSError, AttributeError):  # not Linux: peers still end through the launcher's own watch
        pass


def tied_to(parent: int) -> Callable[[], None]:
    """A `preexec_fn` that ties a new process to `parent`, the caller."""

    def tie() -> None:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)

    return tie


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/pid/stat from the state on, or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def alive(pid: int) -> bool:
    """Whether `pid` is running (a zombie, dead but not yet waited for, is not)."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def exit_of(pid: int) -> tuple[bool, int | None]:
    """Whether `pid` has ended, and its exit code (negative for a signal) while its parent has not asked for it."""
    fields = _stat(pid)
    if fields is None:
        return True, None
    if fields[0] not in "ZX":
        return False, None
    return True, os.waitstatus_to_exitcode(int(fields[49]))


def variable(pid: int, name: str) -> str | None:
    """The environment variable `name` that `pid` was started with, or None."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    start = name.encode() + b"="
    return next(
        (word[len(start) :].decode(errors="replace") for word in words if word.startswith(start)), None
    )


def descendants(root: int) -> list[int]:
    """The living processes that descend from `root`, nearest first, without `root` itself."""
    children: dict[int, list[int]] = {}
    for pid in _pids():
        fields = _stat(pid)
        if fields and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(pid)
    family = list(children.get(root, []))
    for pid in family:  # grows while it is walked: breadth first
        family.extend(children.get(pid, []))
    return family


def marked(name: str, value: str) -> list[int]:
    """The living processes started with the environment variable `name` = `value`, whoever their parent is by now."""
    return [pid for pid in _pids() if variable(pid, name) == value and alive(pid)]


def _pids() -> list[int]:
    return (
        [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()] if os.path.isdir("/proc") else []
    )


def send(pids: Iterable[int], sign: int) -> None:
    """Sends `sign` to each of `pids` that still exists."""
    for pid in pids:
        try:
            os.kill(pid, sign)
        except (ProcessLookupError, PermissionError):
            pass


def kill_all(find: Callable[[], list[int]], patience: float = 5.0) -> None:
    """SIGKILLs what `find` finds until it finds nothing, or for `patience` seconds: the kernel may be busy with one."""
    deadline = time.monotonic() + patience
    while (found := find()) and time.monotonic() < deadline:
        send(found, signal.SIGKILL)
        time.sleep(0.02)
