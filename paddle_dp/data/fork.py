"""Forking a process that already runs Paddle, threads and buffers, so that the copy can do no harm.

The copy never returns into its parent's code, dies with it, does not answer its signals, writes none of its buffers
and frees nothing that it owns.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any

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
