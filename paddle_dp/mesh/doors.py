"""Closes the ports of Paddle's libraries to strangers: neither its store nor gloo authenticates connections.

The libraries own their sockets, but an option set through a duplicate holds for the original. Nothing here needs
privileges, and without /proc nothing is done.
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
ACCEPTED_LATER = 24  # offset in tcp_info of the number of connections that wait to be accepted
PATIENCE = 1.0  # seconds for these to be accepted
ESTABLISHED = "01"
ALONE = "unshare --map-root-user --net sh -c 'ip link set lo up; paddle-dp train …'"


def listen_to_this_machine_only(master: str) -> None:
    """Closes this process's listening sockets to other machines, if `master`, the job's "host:port", is a loopback
    address. Does nothing on a system without SO_BINDTODEVICE.

    Paddle's store listens on all interfaces, independent of its address (3.3.1). After SO_BINDTODEVICE the kernel
    passes it only packets from `lo`. Linux allows that without privileges since 5.7.
    """
    if not master.startswith("127."):
        return
    for end in _sockets():
        if listens_everywhere(end):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


def listens_everywhere(end: socket.socket) -> bool:
    """True if a socket listens at every address of this machine."""
    return _listens(end) and end.getsockname()[0] in EVERYWHERE


def close_to_all(end: socket.socket) -> None:
    """Makes a listening socket ignore all new connections. Raises OSError if the system does not support that."""
    program = ctypes.create_string_buffer(DROP_ALL)
    end.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program)))


class Connections:
    """Checks the connections that a library makes while it starts: none may lead to another user of this machine.

    At `port` a store listens. Strangers' connections to it are cut: they can only have written names that the ranks do
    not use (secret.py).
    """

    def __init__(self, port: int = 0):
        self.port = port
        self._before = {_inode(end) for end in _sockets()}

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Wraps the connecting of a group: raises JobError if another user made it fail, as gloo accepts the first
        connection and refuses the expected rank."""
        try:
            yield
        except Exception:
            self.check()
            raise

    def check(self) -> None:
        """Raises JobError if a connection made since this object was created leads to another user's process, which
        would read gradients. Users of other machines cannot be identified."""
        users = _users()
        for end in _sockets():
            user = None if _inode(end) in self._before else users.get(_ends(end))
            if user in (None, 0, os.geteuid()):
                continue
            if self.port and end.getsockname()[1] == self.port:
                end.shutdown(socket.SHUT_RDWR)
                continue
            port, peer = end.getsockname()[1], end.getpeername()[1]
            raise JobError(
                f"user {user} of this machine has come between the ranks while they connected (ports {port} and "
                f"{peer}), and the job ends before anything is exchanged. Start it again; if that repeats, in a "
                f"separate network: {ALONE}"
            )

    def close_port(self) -> None:
        """Closes `port`, where this process's store listens, to new connections, and cuts strangers'. Call it when all
        ranks have connected. Raises JobError like `check`."""
        for end in _sockets():
            if _listens(end) and end.getsockname()[1] == self.port:
                with contextlib.suppress(OSError):
                    close_to_all(end)
                    _wait_until_accepted(end)
        self.check()


def _wait_until_accepted(end: socket.socket) -> None:
    """Waits until the library has accepted all connections, so that strangers' connections can be seen."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACCEPTED_LATER + 4)
        if not struct.unpack_from("=I", info, ACCEPTED_LATER)[0]:
            return
        time.sleep(0.005)


def _sockets() -> Iterator[socket.socket]:
    """Yields duplicates of this process's TCP sockets; each is closed before the next one."""
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
    """Returns the user of each established TCP connection's end on this machine, by its address and its peer's."""
    users = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, address, peer, state, *_, user = line.split()[:8]
                if state == ESTABLISHED:
                    users[_as_version_4(address), _as_version_4(peer)] = int(user)
    return users


def _ends(end: socket.socket) -> tuple[str, str]:
    """Returns the addresses of a socket's peer and of the socket, as in /proc; ("", "") without a peer."""
    try:
        return _written(end.family, *end.getpeername()[:2]), _written(end.family, *end.getsockname()[:2])
    except OSError:
        return "", ""


def _written(family: int, host: str, port: int) -> str:
    """Returns the address as in /proc: «0100007F:1F90» for 127.0.0.1:8080."""
    packed = socket.inet_pton(family, host.partition("%")[0])
    groups = struct.unpack(f"={len(packed) // 4}I", packed)
    return _as_version_4("".join(f"{group:08X}" for group in groups) + f":{port:04X}")


def _as_version_4(address: str) -> str:
    """Returns an IPv4-mapped IPv6 address as IPv4; other addresses unchanged."""
    mapped = "".join(f"{group:08X}" for group in struct.unpack("=3I", bytes(10) + b"\xff\xff"))
    return address.removeprefix(mapped)
