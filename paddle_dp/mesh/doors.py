"""The ports of Paddle's libraries, closed to whom they are not for: neither its store nor gloo asks who connects.

Their sockets are the library's own; an option that is set through a duplicate of one holds for the original. Nothing
here needs privileges, and nothing is done where the system has no /proc.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from paddle_dp.errors import JobError

EVERYWHERE = ("0.0.0.0", "::")
ATTACH_FILTER = 26  # SO_ATTACH_FILTER, for which Python has no name
DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # one instruction of a packet filter: keep 0 bytes
ACCEPTED_LATER = 24  # where tcp_info has the number of connections that wait to be accepted
PATIENCE = 1.0  # seconds for these to be accepted
ESTABLISHED = "01"
ALONE = "unshare --map-root-user --net sh -c 'ip link set lo up; paddle-dp train …'"


def listen_to_this_machine_only(master: str) -> None:
    """Closes this process's listening sockets to other machines, if the job's master, "host:port", is a loopback
    address. Nothing where the system has no such way.

    Paddle's store listens on all interfaces whatever address it is given (3.3.1). After SO_BINDTODEVICE the kernel
    hands it only what arrives through `lo`. Linux allows that to everybody since 5.7.
    """
    if not master.startswith("127."):
        return
    for end in _sockets():
        if listens_everywhere(end):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


def listens_everywhere(end: socket.socket) -> bool:
    """Whether a socket takes connections that come to any address of this machine."""
    return _listens(end) and end.getsockname()[0] in EVERYWHERE


def close_to_all(end: socket.socket) -> None:
    """From now on a listening socket hears of no new connection. Raises OSError where the system has no such way."""
    program = ctypes.create_string_buffer(DROP_ALL)
    end.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))


class Connections:
    """The connections that a library makes while it starts: none may lead to another user of this machine.

    `port`: where a store listens, which strangers may have connected to. Their connections are cut: what they can have
    written is under names that the ranks do not use (secret.py).
    """

    def __init__(self, port: int = 0):
        self.port = port
        self._before = {_inode(end) for end in _sockets()}

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Around the meeting of a group: where it fails because another user has come between, that is the error. gloo
        takes whoever connects first, and refuses the rank that was meant."""
        try:
            yield
        except Exception:
            self.check()
            raise

    def check(self) -> None:
        """Raises JobError where a connection that is new since this object was made leads to another user's process:
        gradients would go through it. Users cannot be told across machines."""
        users = _users()
        for end in _sockets():
            user = None if _inode(end) in self._before else users.get(_ends(end))
            if user in (None, 0, os.geteuid()):
                continue
            if self.port and end.getsockname()[1] == self.port:
                end.shutdown(socket.SHUT_RDWR)
                continue
            own, peer = end.getsockname()[1], end.getpeername()[1]
            raise JobError(
                f"user {user} of this machine has come between the ranks while they connected (ports {own} and "
                f"{peer}), and the job ends before anything is exchanged. Start it again; where that user goes on, in "
                f"a network of its own: {ALONE}"
            )

    def close_port(self) -> None:
        """From now on nobody can connect to `port`, where a store of this process listens, and strangers' connections
        to it are cut; the ranks' own stay. Call it when all ranks have connected."""
        for end in _sockets():
            if _listens(end) and end.getsockname()[1] == self.port:
                with contextlib.suppress(OSError):
                    close_to_all(end)
                    _wait_until_accepted(end)
        self.check()


def _wait_until_accepted(end: socket.socket) -> None:
    """Waits for the library to accept what has connected, so that the connections of strangers can be seen."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACCEPTED_LATER + 4)
        if not struct.unpack_from("=I", info, ACCEPTED_LATER)[0]:
            return
        time.sleep(0.005)


def _sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets, each until the next one."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            try:
                end = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)  # a file, a pipe
                continue
            with end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                    yield end


def _listens(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _inode(end: socket.socket) -> int:
    return os.fstat(end.fileno()).st_ino


def _users() -> dict[tuple[str, str], int]:
    """The user of each established TCP connection's end on this machine, by its own address and its peer's."""
    users = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, own, peer, state, *_, user = line.split()[:8]
                if state == ESTABLISHED:
                    users[_as_version_4(own), _as_version_4(peer)] = int(user)
    return users


def _ends(end: socket.socket) -> tuple[str, str]:
    """The addresses of a socket's peer and its own, as /proc writes them; empty where it has no peer."""
    try:
        return _written(end.family, *end.getpeername()[:2]), _written(end.family, *end.getsockname()[:2])
    except OSError:
        return "", ""


def _written(family: int, host: str, port: int) -> str:
    """«0100007F:1F90» for 127.0.0.1:8080."""
    packed = socket.inet_pton(family, host.partition("%")[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return _as_version_4("".join(f"{word:08X}" for word in words) + f":{port:04X}")


def _as_version_4(address: str) -> str:
    """An address of version 4 in the clothes of version 6 as it is."""
    mapped = "".join(f"{word:08X}" for word in struct.unpack("=3I", bytes(10) + b"\xff\xff"))
    return address.removeprefix(mapped)
