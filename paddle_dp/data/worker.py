"""A worker is a forked process that answers commands, dies with its parent, and is detected when it hangs.

Paddle's workers outlive a killed rank, leave files in /dev/shm, die of a Ctrl-C that the rank would handle, and hang
unnoticed. This one has two pipes and one page of anonymous shared memory, which leave no traces. The child never
returns into the parent's code, ignores its signals, flushes none of its buffers and frees none of its objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import mmap
import os
import select
import signal
import stat
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from paddle_dp.kernel_kills import KernelKills
from paddle_dp.mesh.heartbeat import heartbeat

_LENGTH = struct.Struct("<q")
_TICK = 1.0  # seconds between two checks of a silent worker
# By whom, from `KernelKills.lately`.
_KILLER = {
    True: ", by the kernel: memory ran out; fewer loader.num_workers or smaller samples need less",
    False: ", by a person or another program: memory had not run out",
    None: "; is the machine out of memory?",
}
_dying: list[Worker] = []  # killed workers that the kernel has not let go yet
_parents_ends: set[int] = set()  # descriptors of all workers' pipes: a worker must not keep another's open

Reply = dict[str, Any]
"""JSON; the list of arrays under "arrays" is sent in binary after the text."""
Progress = np.ndarray[Any, Any]
Answer = Callable[[Reply], None]
WorkerMain = Callable[[BinaryIO, Answer, Progress], None]
"""A worker's main function: serve(commands, reply, progress); it returns when the commands end."""


class WorkerHungError(Exception):
    """The worker lives, but has made no progress for longer than allowed."""


class WorkerEndedError(Exception):
    """The worker has ended; the text explains how."""


class Worker:
    """A forked process that runs `serve`. It changes the shared `progress`, int64 [2], as a sign of life."""

    def __init__(self, serve: WorkerMain):
        _dying[:] = [worker for worker in _dying if not worker._reaped()]
        self.progress: Progress = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=np.int64, count=2)
        self._status: int | None = None
        self._kernel = KernelKills()
        for_worker, self._commands = os.pipe()
        self._replies, from_worker = os.pipe()
        _parents_ends.update((self._commands, self._replies))
        self.pid = fork(lambda: _run(serve, for_worker, from_worker, self.progress), close=_parents_ends)
        for end in (for_worker, from_worker):
            os.close(end)
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)

    def send(self, command: bytes) -> None:
        """Sends a command. If the worker is gone, the next `receive` raises."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, command)

    def receive(self, timeout: float) -> Reply:
        """The next reply. Raises WorkerHungError after `timeout` seconds without progress, WorkerEndedError if gone."""
        if self.progress[0]:
            heartbeat.at(int(self.progress[1]))
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, timeout))
        reply: Reply = json.loads(self._exactly(length, timeout))
        if "arrays" in reply:
            reply["arrays"] = [self._array(dtype, shape, timeout) for dtype, shape in reply["arrays"]]
        return reply

    def _await_bytes(self, timeout: float) -> None:
        """Waits for bytes of a reply, or its end. Raises WorkerHungError, WorkerEndedError."""
        last_progress, since = self.progress.tolist(), time.monotonic()
        self._kernel.look(since)
        while not self._poll.poll(1000 * min(timeout, _TICK)):
            if self._reaped():
                raise WorkerEndedError(self._how_it_ended())
            if (now := self.progress.tolist()) != last_progress:
                last_progress, since = now, time.monotonic()
                heartbeat.at(now[1])
            elif time.monotonic() - since > timeout:
                raise WorkerHungError

    def busy_seconds(self) -> float:
        """The worker's CPU seconds so far; 0 if unknown (proc(5): fields 14 and 15)."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _array(self, dtype: str, shape: list[int], timeout: float) -> np.ndarray[Any, Any]:
        content = self._exactly(prod(shape) * np.dtype(dtype).itemsize, timeout)
        return np.frombuffer(content, dtype).reshape(shape)

    def _exactly(self, size: int, timeout: float) -> bytearray:
        """Reads `size` bytes. Raises WorkerEndedError if the pipe ends earlier, WorkerHungError if it stays empty."""
        content = bytearray(size)
        rest = memoryview(content)
        while rest:
            self._await_bytes(timeout)
            got = os.readv(self._replies, [rest])
            if not got:
                self._await_end(1.0)
                raise WorkerEndedError(self._how_it_ended())
            rest = rest[got:]
        return content

    def end(self) -> None:
        """Kills the worker and its children; waits one second at most, since a worker blocked in the kernel stays.

        The next worker that starts reaps it."""
        if self._commands < 0:
            return
        if not self._reaped():
            for kill in (os.killpg, os.kill):  # its session, or the process if it has not made one yet
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            self._await_end(1.0)
        if self._status is None:
            _dying.append(self)
        for end in (self._commands, self._replies):
            _parents_ends.discard(end)
            os.close(end)
        self._commands = -1

    def _reaped(self) -> bool:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code of this program has waited for any child
                pid, status = self.pid, 0
            self._status = status if pid else None
        return self._status is not None

    def _await_end(self, seconds: float) -> None:
        """Waits until the process is gone, for `seconds` at most."""
        give_up = time.monotonic() + seconds
        while not self._reaped() and time.monotonic() < give_up:
            time.sleep(0.002)

    def _how_it_ended(self) -> str:
        code = 0 if self._status is None else os.waitstatus_to_exitcode(self._status)
        if code == -signal.SIGKILL:
            return f"was killed (SIGKILL{_KILLER[self._kernel.lately()]})"
        if code == -signal.SIGBUS:
            return "was ended by SIGBUS, often a file that was cut short while it was mapped into memory"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit status {code}"


def _run(serve: WorkerMain, commands: int, replies: int, progress: Progress) -> None:
    _parents_ends.clear()  # they are closed; a worker of this worker may reuse the numbers

    def reply(content: Reply) -> None:
        arrays = [np.ascontiguousarray(array) for array in content.get("arrays", ())]
        if arrays:
            content = {**content, "arrays": [[array.dtype.str, array.shape] for array in arrays]}
        text = json.dumps(content).encode()
        _write(replies, _LENGTH.pack(len(text)) + text)
        for array in arrays:
            _write(replies, array.reshape(-1).view(np.uint8))

    with open(commands, "rb") as stream:
        serve(stream, reply, progress)


def _write(pipe: int, content: Any) -> None:
    """Writes all of `content`, in several parts if the pipe is full."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(pipe, rest) :]


_PR_SET_PDEATHSIG = 1
_never_collected: list[Any] = []  # objects that a child must not free


def fork(main: Callable[[], None], close: Iterable[int] = ()) -> int:
    """Forks a child that closes the descriptors `close`, runs `main` and exits; returns its process id."""
    # Linux sends PDEATHSIG when the forking *thread* ends, so it is set only if the main thread forks.
    libc = ctypes.CDLL(None) if threading.current_thread() is threading.main_thread() else None
    parent = os.getpid()
    with warnings.catch_warnings():  # Python 3.12 warns of a fork with threads: see the module's docstring
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _detach(libc, parent)
        for descriptor in close:
            os.close(descriptor)
        _reopen_files()
        main()
        status = 0
    except BaseException:  # noqa: BLE001 - nothing may unwind into the parent's code
        traceback.print_exc()
    finally:
        os._exit(status)


def _reopen_files() -> None:
    """Opens the files that are read, and temporary ones, once more, under their descriptors and at their positions.

    A fork shares the position in each file with its parent: of two processes that seek and read, one would read at the
    other's position. Other files that are written stay shared, so that no process writes over another's lines, and so
    do those that the system does not open again.
    """
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        descriptor = int(name)
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_ACCMODE | os.O_APPEND)
            access, status = flags & os.O_ACCMODE, os.fstat(descriptor)
            is_safe = bool(flags & os.O_APPEND) or not status.st_nlink  # no other process loses lines
            is_read = access == os.O_RDONLY or (access == os.O_RDWR and is_safe)
            if descriptor in (1, 2) or not (stat.S_ISREG(status.st_mode) and is_read):
                continue
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            reopened = os.open(f"/proc/self/fd/{descriptor}", flags)
            os.lseek(reopened, position, os.SEEK_SET)
            os.dup2(reopened, descriptor, inheritable=os.get_inheritable(descriptor))
            os.close(reopened)


def _detach(libc: ctypes.CDLL | None, parent: int) -> None:
    """Detaches a forked child from its parent's objects, signals and streams; it still dies with the parent."""
    heartbeat.detach()
    gc.freeze()  # keeps the parent's objects: no tensor is freed, no file flushed
    os.setsid()  # a Ctrl-C reaches the parent's group only; the parent ends its workers itself
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGBUS, signal.SIG_DFL)  # Paddle's handler waits for ever in a fork
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):  # schedulers send them to every process
        signal.signal(number, signal.SIG_IGN)  # the rank still reads; afterwards it ends its workers itself
    if libc is not None and sys.platform == "linux":
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _never_collected.extend((sys.stdout, sys.stderr))  # only the parent may write the text in their buffers
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
