"""Listening sockets of a job on one machine, closed to other machines.

Paddle's store listens on all interfaces whatever address it is given (3.3.1), without a password. Its sockets are the
library's own; SO_BINDTODEVICE, set through a duplicate, holds for the original, and from then on the kernel hands it
only what arrives through `lo`: connections from this machine. Linux allows it to everybody since 5.7.
"""

from __future__ import annotations

import contextlib
import os
import socket

EVERYWHERE = ("0.0.0.0", "::")


def listen_to_this_machine_only(master: str) -> None:
    """Closes this process's listening sockets to other machines, if the job's master, "host:port", is a loopback
    address. Nothing where the system has no such way."""
    if not master.startswith("127.") or not os.path.isdir("/proc/self/fd"):
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            try:
                end = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)  # a file, a pipe
                continue
            with end:
                if listens_everywhere(end):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


def listens_everywhere(end: socket.socket) -> bool:
    """Whether a socket takes connections that come to any address of this machine."""
    if end.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(listens) and end.getsockname()[0] in EVERYWHERE
