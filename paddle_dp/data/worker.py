"""A worker: a forked process that answers commands, dies with its parent, and can be told from one that hangs.

Paddle's own workers outlive a killed rank, leave files in /dev/shm, fall to a Ctrl-C meant for the rank, and hang
unnoticed. This one has two pipes and one page of anonymous shared memory: there is nothing to leave behind. It is a
fork of a process that already runs Paddle, threads and buffers: the copy never returns into its parent's code, does
not answer its signals, writes none of its buffers and frees nothing that it owns.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import mmap
import os
import select
import signal
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO

import numpy as np

_LENGTH = struct.Struct("<q")
_TICK = 1.0  # seconds between two looks at a silent worker
_parents_ends: set[int] = set()  # of the pipes to all workers: none may hold another's open

Reply = dict[str, Any]
Progress = np.ndarray[Any, Any]
Answer = Callable[[Reply], None]
WorkerMain = Callable[[BinaryIO, Answer, Progress], None]
"""What a worker does: serve(commands, tell, progress), until the commands end."""


class WorkerHungError(Exception):
    """It lives, and has made no progress for longer than allowed."""


class WorkerEndedError(Exception):
    """It is gone; the text says how it went."""


class Worker:
    """A forked process that runs `serve`. `progress`, int64 [2], is shared with it: changing it is a sign of life."""

    def __init__(self, serve: WorkerMain):
        self.progress: Progress = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=np.int64, count=2)
        self._status: int | None = None
        for_worker, self._commands = os.pipe()
        self._replies, from_worker = os.pipe()
        _parents_ends.update((self._commands, self._replies))
        self.pid = fork(lambda: _run(serve, for_worker, from_worker, self.progress), close=_parents_ends)
        for end in (for_worker, from_worker):
            os.close(end)
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)

    def send(self, command: bytes) -> None:
        """Hand it a command; whether it is still there is for `receive` to find out."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, command)

    def receive(self, timeout: float) -> Reply:
        """Its next reply; ChildHungError when it makes no progress for `timeout` seconds, ChildEndedError if gone."""
        seen, since = self.progress.tolist(), time.monotonic()
        while not self._poll.poll(1000 * min(timeout, _TICK)):
            if self._reaped():
                raise WorkerEndedError(self._epitaph())
            if (now := self.progress.tolist()) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > timeout:
                raise WorkerHungError
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        reply: Reply = json.loads(self._exactly(length))
        return reply

    def _exactly(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = os.read(self._replies, size - len(parts))
            if not part:
                self._await_end(1.0)
                raise WorkerEndedError(self._epitaph())
            parts += part
        return parts

    def end(self) -> None:
        """Kill it, and whatever it started; a process that even SIGKILL cannot end is left to the system."""
        if self._commands < 0:
            return
        if not self._reaped():
            for kill in (os.killpg, os.kill):  # its session, or itself when it had no time to begin one
                with contextlib.suppress(ProcessLookupError):
                    kill(self.pid, signal.SIGKILL)
            self._await_end(1.0)
        for end in (self._commands, self._replies):
            _parents_ends.discard(end)
            os.close(end)
        self._commands = -1

    def _reaped(self) -> bool:
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else in this program waits for any worker
                pid, status = self.pid, 0
            self._status = status if pid else None
        return self._status is not None

    def _await_end(self, seconds: float) -> None:
        """Wait for the process to be gone, but never for ever: one blocked in the kernel does not die."""
        give_up = time.monotonic() + seconds
        while not self._reaped() and time.monotonic() < give_up:
            time.sleep(0.002)

    def _epitaph(self) -> str:
        code = 0 if self._status is None else os.waitstatus_to_exitcode(self._status)
        if code == -signal.SIGKILL:
            return "was killed (SIGKILL; is the machine out of memory?)"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit status {code}"


def _run(serve: WorkerMain, commands: int, replies: int, progress: Progress) -> None:
    def tell(reply: Reply) -> None:
        text = json.dumps(reply).encode()
        os.write(replies, _LENGTH.pack(len(text)) + text)

    with open(commands, "rb") as stream:
        serve(stream, tell, progress)


_PR_SET_PDEATHSIG = 1
_kept: list[Any] = []  # what must not be collected in a copy


def fork(main: Callable[[], None], close: Iterable[int] = ()) -> int:
    """The process id of a copy of this process that closes the descriptors `close`, runs `main`, and ends."""
    # The signal of a parent's death comes when the *thread* that forked ends, so only the main thread may ask for it.
    libc = ctypes.CDLL(None) if threading.current_thread() is threading.main_thread() else None
    parent = os.getpid()
    with warnings.catch_warnings():  # Python 3.12 warns of forking beside threads: for that, see the top
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _leave_the_parent(libc, parent)
        for descriptor in close:
            os.close(descriptor)
        main()
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it must not unwind into the parent's code
        traceback.print_exc()
    finally:
        os._exit(status)


def _leave_the_parent(libc: ctypes.CDLL | None, parent: int) -> None:
    """Cut what ties a fresh copy to its parent, except that it dies with it."""
    gc.freeze()  # nothing that the parent made is collected here: no tensor freed, no file flushed
    os.setsid()  # a signal to the parent's group is for the parent: it ends us when it is ready
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if libc is not None and sys.platform == "linux":
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _kept.extend((sys.stdout, sys.stderr))  # with what the parent has still to write: that is for the parent
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
