"""Finds processes, their descendants and their ends in /proc, kills a tree of them, and records signals to this one.

Paddle's launcher starts each rank in a separate session, so killing a process group would miss the ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
REPEATED = 5.0  # seconds within which an engine of a cluster may send one request twice
# Signals by which a person or a scheduler ends a job: interrupt, terminate, hang up, and schedulers' SIGUSR1.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
KERNEL_THREAD = 0x00200000  # PF_KTHREAD of /proc/pid/stat's flags
EXEC_TIME = 1.0  # seconds that a process may take for replacing its program on a busy machine


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends.

    It misses a parent that ended before the call: compare `os.getppid()` afterwards.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of its descendants when their parents end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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


def text_of(file: Path) -> str:
    """Returns a file's text; "" if it cannot be read, as of a process that has ended."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """Returns the fields of /proc/pid/stat from the state on, or None if there is no such process."""
    text = text_of(Path(f"/proc/{pid}/stat"))
    return text[text.rindex(")") + 2 :].split() if text else None


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
    path, deadline = Path(f"/proc/{pid}/environ"), time.monotonic() + EXEC_TIME
    try:
        while not (environ := path.read_bytes()) and _has_environment(pid) and time.monotonic() < deadline:
            time.sleep(0.001)
    except OSError:
        return None
    start = name.encode() + b"="
    values = (entry[len(start) :] for entry in environ.split(b"\0") if entry.startswith(start))
    return next((value.decode(errors="replace") for value in values), None)


def _has_environment(pid: int) -> bool:
    """True if `pid` has an environment, or is replacing its program: for that time /proc shows none.

    A process that is looked for by its mark would be missed then, and left behind.
    """
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX" or int(fields[6]) & KERNEL_THREAD:
        return False
    env_start, env_end = int(fields[47]), int(fields[48])  # both 0 while the program is replaced
    return env_start == 0 or env_start < env_end


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
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]


def send(pids: Iterable[int], sign: int) -> None:
    """Sends `sign` to each of `pids` that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, sign)


def kill_all(find: Callable[[], list[int]]) -> None:
    """Sends SIGKILL to the processes that `find` returns until it returns none and all of them have ended, for 5 s at
    most.

    While a killed process frees its memory, it has no environment any more, so that `marked` misses it.
    """
    deadline, known_pids = time.monotonic() + 5.0, set[int]()
    while time.monotonic() < deadline:
        known_pids.update(pids := find())
        if not pids and not any(map(alive, known_pids)):
            return
        send(pids, signal.SIGKILL)
        time.sleep(0.02)


def kill_tree(process: Popen[Any]) -> None:
    """Kills a child process that still runs, with its descendants."""
    kill_all(lambda: [*descendants(process.pid), process.pid] if process.poll() is None else [])


def remove_shared_memory(pids: Iterable[int], folder: Path = Path("/dev/shm")) -> None:
    """Removes the files of Paddle's data loader in these processes: a killed process leaves them, and they take memory.

    Call it when the processes are gone.
    """
    for pid in pids:
        for path in folder.glob(f"paddle_{pid}_*_*"):
            with suppress(OSError):  # another user's, or gone
                path.unlink()


@dataclass
class Signals:
    """The first signal to this process, 0 without one, and the count of requests: a second one means "now".

    Engines of clusters send one request twice: Slurm sends SIGTERM to a task, and its srun passes on another one. So a
    signal that follows the same one within `REPEATED` is no request, unless a person types it (SIGINT).
    """

    number: int = 0
    times: int = 0
    last: tuple[int, float] = (0, 0.0)  # the last request: its signal, and seconds of the monotonic clock

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name if self.number else ""

    def record(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal."""
        now = time.monotonic()
        if number != signal.SIGINT and number == self.last[0] and now - self.last[1] < REPEATED:
            return
        self.number = self.number or number
        self.times, self.last = self.times + 1, (number, now)


@contextmanager
def recorded_signals(ends_process: bool = False) -> Iterator[Signals]:
    """Records END_SIGNALS within the context, so that they do not end the process.

    `ends_process`: it ends after the context, with a status that no later signal replaces: they are ignored.
    """
    signals = Signals()
    with handled_signals(END_SIGNALS, signals.record, signal.SIG_IGN if ends_process else None):
        yield signals


def ignore_end_signals() -> None:
    """Ignores END_SIGNALS from now on: this process is about to end, with a status that none of them replaces."""
    with recorded_signals(ends_process=True):
        pass


@contextmanager
def handled_signals(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], None], afterwards: Any = None
) -> Iterator[None]:
    """Handles these signals by `handler` within the context, and `afterwards` by that one (None: as before it, unless a
    context within has set one for afterwards); in another thread than the main one it has no effect."""
    before: dict[int, Any] = {}
    for number in numbers if threading.current_thread() is threading.main_thread() else ():
        # Under nohup SIGHUP stays ignored. SIGUSR1 is ignored only by `tied_to`, so it is handled.
        if number == signal.SIGUSR1 or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            if afterwards is not None or signal.getsignal(number) == handler:
                signal.signal(number, former if afterwards is None else afterwards)
