"""Finds processes, their descendants and their ends in /proc, and kills a whole tree of them.

Paddle's launcher starts each worker in a separate session, so killing a process group would miss the workers. Without
/proc (macOS) only the launcher can end them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(sign: int = signal.SIGKILL) -> None:
    """Makes the kernel send this process `sign` when the thread that started it ends (Linux only).

    It misses a parent that ended before the call: compare `os.getppid()` afterwards.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sign, 0, 0, 0)
    except (OSError, AttributeError):  # not Linux: the launcher still ends its workers
        pass


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants when their parents end (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tied_to(parent: int) -> Callable[[], None]:
    """Returns a `preexec_fn` that ties a new process to `parent`, the caller."""

    def tie() -> None:
        die_with_parent()
        # Schedulers send it to all processes; only ranks that can stop in order handle it.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if os.getppid() != parent:
            os._exit(1)

    return tie


def child_options() -> dict[str, Any]:
    """Returns the options of `Popen` for a process that this one ends in order, and that a kill -9 of this one ends:
    Ctrl-C reaches only this process."""
    return {"start_new_session": True, "preexec_fn": tied_to(os.getpid())}


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/pid/stat from the state on, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def alive(pid: int) -> bool:
    """True if `pid` is running (a zombie, dead but not yet waited for, is not)."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def is_stopped(pid: int) -> bool:
    """True if `pid` is stopped: by SIGSTOP, from a terminal, with a debugger."""
    fields = _stat(pid)
    return fields is not None and fields[0] in "Tt"


def exit_of(pid: int) -> tuple[bool, int | None]:
    """Returns True if `pid` has ended, and its exit code (negative for a signal).

    The code is None for a running process, and after its parent has waited for it.
    """
    fields = _stat(pid)
    if fields is None:
        return True, None
    if fields[0] not in "ZX":
        return False, None
    return True, os.waitstatus_to_exitcode(int(fields[49]))


def variable(pid: int, name: str) -> str | None:
    """Returns the environment variable `name` with which `pid` was started, or None."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    start = name.encode() + b"="
    return next(
        (entry[len(start) :].decode(errors="replace") for entry in entries if entry.startswith(start)), None
    )


def descendants(root: int) -> list[int]:
    """Returns the living descendants of `root`, nearest first, without `root` itself."""
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
    """Returns all living processes started with the environment variable `name` = `value`."""
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
    """Sends SIGKILL to the processes that `find` returns until it returns none, for `patience` seconds at most."""
    deadline = time.monotonic() + patience
    while (pids := find()) and time.monotonic() < deadline:
        send(pids, signal.SIGKILL)
        time.sleep(0.02)


def remove_shared_memory(pids: Iterable[int], folder: Path = Path("/dev/shm")) -> None:
    """Removes the files of Paddle's data loader in these processes: a killed process leaves them, and they take memory.

    Call it when the processes are gone.
    """
    names = {f"paddle_{pid}_" for pid in pids}
    for path in folder.glob("paddle_*_*_*"):
        if any(path.name.startswith(name) for name in names):
            with suppress(OSError):  # another user's, or gone
                path.unlink()
