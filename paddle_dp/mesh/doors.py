"""Closes the ports of Paddle's libraries to strangers: neither its store nor gloo authenticates connections.

The libraries own their sockets, but an option set through a duplicate holds for the original. Nothing here needs
privileges, and without /proc nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
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
# "connect [127.0.0.1]:23430: Connection refused": gloo prints the port's two bytes in the order of the network.
_GLOO_ADDRESS = re.compile(r"\[([0-9a-fA-F.:]+)\]:(\d+)")
ALONE = "unshare --map-root-user --net sh -c 'ip link set lo up; paddle-dp train …'"


def listen_to_this_machine_only(master: str) -> None:
    """Closes this process's listening sockets to other machines, if `master`, the job's "host:port", is a loopback
    address. Does nothing on a system without SO_BINDTODEVICE.

    Paddle's store listens on all interfaces, independent of its address (3.3.1). After SO_BINDTODEVICE the kernel
    passes it only packets from `lo`. Linux allows that without privileges since 5.7.
    """
    if not master.startswith("127."):
        return
    for end in sockets():
        if _listens(end) and end.getsockname()[0] in EVERYWHERE:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


def send_at_once() -> None:
    """Makes this process's TCP connections send small messages at once, and those that its listening sockets accept.

    Paddle's store writes a request in pieces, and the kernel holds the second one back until the first is acknowledged:
    44 ms for each `add`, 88 ms for a `get` (3.3.1). Call it when the store is there, before anything else uses it.
    """
    for end in sockets():
        with contextlib.suppress(OSError):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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
        self._before = {_inode(end) for end in sockets()}

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Wraps the connecting of a group: raises JobError if another user made it fail.

        gloo accepts the first connection and refuses the expected rank. The refused rank fails first and has no
        connection with the stranger, but knows the address at which the stranger has taken its place.
        """
        try:
            yield
        except Exception as error:
            self.check()
            addresses = _GLOO_ADDRESS.findall(str(error))
            refused = {_address(host, socket.ntohs(int(port))) for host, port in addresses}
            for (local, remote), user in _strangers().items():
                if remote in refused:
                    raise _come_between(user, remote[1], local[1]) from error
            raise

    def check(self) -> None:
        """Raises JobError if a connection made since this object was created leads to another user's process, which
        would read gradients. Users of other machines cannot be identified."""
        strangers = _strangers()
        for end in sockets() if strangers else ():
            ends = None if _inode(end) in self._before else _ends(end)
            user = strangers.get(ends) if ends else None
            if user is None:
                continue
            if self.port and end.getsockname()[1] == self.port:
                end.shutdown(socket.SHUT_RDWR)
                continue
            raise _come_between(user, end.getsockname()[1], end.getpeername()[1])

    def close_port(self) -> None:
        """Closes `port`, where this process's store listens, to new connections, and cuts strangers'. Call it when all
        ranks have connected. Raises JobError like `check`."""
        for end in sockets():
            if _listens(end) and end.getsockname()[1] == self.port:
                with contextlib.suppress(OSError):
                    close_to_all(end)
                    _wait_until_accepted(end)
        self.check()


def _come_between(user: int, port: int, peer: int) -> JobError:
    return JobError(
        f"user {user} of this machine has come between the ranks while they connected (ports {port} and {peer}), and "
        f"the job ends before anything is exchanged. Start it again; if that repeats, in a separate network: {ALONE}"
    )


def _wait_until_accepted(end: socket.socket) -> None:
    """Waits until the library has accepted all connections, so that strangers' connections can be seen."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACCEPTED_LATER + 4)
        if not struct.unpack_from("=I", info, ACCEPTED_LATER)[0]:
            return
        time.sleep(0.005)


def sockets() -> Iterator[socket.socket]:
    """Yields duplicates of this process's TCP sockets, also of its libraries'; each is closed before the next one."""
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


Address = tuple[object, int]
"""An IP address, version 4 where a socket of version 6 carries one, and the port."""


def _strangers() -> dict[tuple[Address, Address], int]:
    """Returns the user, neither root nor this one, of each TCP connection's end, by its address and its peer's."""
    users, known = {}, ("0", str(os.geteuid()))
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, address, peer, state, *_, user = line.split()[:8]
                if state == ESTABLISHED and user not in known:
                    users[_read_address(address), _read_address(peer)] = int(user)
    return users


def _read_address(text: str) -> Address:
    """Reads an address of /proc: "0100007F:1F90" is 127.0.0.1:8080, in 32-bit words of this machine's byte order."""
    words, _, port = text.partition(":")
    numbers = [int(words[at : at + 8], 16) for at in range(0, len(words), 8)]
    return _address(struct.pack(f"={len(numbers)}I", *numbers), int(port, 16))


def _ends(end: socket.socket) -> tuple[Address, Address] | None:
    """Returns the addresses of a socket's peer and of the socket; None without a peer."""
    try:
        peer, local = end.getpeername(), end.getsockname()
    except OSError:
        return None
    return _address(peer[0].partition("%")[0], peer[1]), _address(local[0].partition("%")[0], local[1])


def _address(host: str | bytes, port: int) -> Address:
    address = ipaddress.ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address, port
