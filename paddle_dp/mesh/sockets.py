"""A socket between two ranks: listening, reaching a peer, and the codes by which each end knows the other.

On one machine it is a Unix socket, to which no other user can connect. Across machines it is a TCP socket: both ends
prove that they know the job's key before anything is read. With a key, each message also carries a code that only its
holders can make, unless PADDLE_DP_SEAL=off.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import os
import secrets
import socket
import struct
import tempfile
from typing import TYPE_CHECKING

from paddle_dp.mesh.environment import rank_host
from paddle_dp.mesh.secret import code_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

DIGITS = 16  # random bytes of each end, first the listener's, so that no code is valid twice
HELLO_CODE = 32  # bytes of an end's code
HELLO = struct.Struct(f"<{DIGITS}sqq{HELLO_CODE}s")  # a caller's digits, its rank, the listener's, its code
CODE = 16  # bytes of the code after each message between machines


def listen(single_machine: bool) -> tuple[socket.socket, str]:
    """Returns a listening socket, and the address at which peers find it."""
    if single_machine:
        with contextlib.suppress(OSError):
            return _listen_here()
    listener = socket.create_server((rank_host(), 0), backlog=64)
    host, port = listener.getsockname()[:2]
    return listener, f"{host}:{port}"


def _listen_here() -> tuple[socket.socket, str]:
    """Returns a Unix socket whose only name is a descriptor of this process, and its address. The kernel admits only
    this user. Raises OSError on a system without such names."""
    if not hasattr(os, "O_PATH"):
        raise OSError("this system has no O_PATH")
    listener = socket.socket(socket.AF_UNIX)
    with tempfile.TemporaryDirectory(prefix="paddle_dp-") as path:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{folder}/socket")  # a name of 107 bytes at most
            file = os.open("socket", os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
        finally:
            os.close(folder)
    listener.listen(64)
    address = f"/proc/{os.getpid()}/fd/{file}"
    with socket.socket(socket.AF_UNIX) as probe:  # tests that peers can connect
        probe.connect(address)
        listener.accept()[0].close()
    return listener, address


def reach(address: str, patience: float) -> socket.socket:
    """Connects to an address of `listen`; reading times out after `patience` seconds. Raises ConnectionError if no
    process of this user listens there any more; another OSError if its machine is not reached."""
    if not address.startswith("/"):
        host, port = address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=patience)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
        if _is_same_user(connection):
            connection.settimeout(patience)
            return connection
        raise ConnectionError(f"another user listens at {address}")
    except OSError as error:
        connection.close()
        raise ConnectionError(f"no process listens at {address} ({error})") from error


def keep_alive(connection: socket.socket) -> None:
    """Makes the kernel probe a silent peer on another machine: after 10 s, then every 5 s, twice at most."""
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def introduce(connection: socket.socket, key: bytes, caller: int, listener: int) -> bytes | None:
    """Proves to the listener that this end is rank `caller`, and checks that the other is rank `listener`. Returns the
    ends' names, their digits and ranks, or None if a code fails."""
    if (challenge := read(connection, DIGITS)) is None:
        return None
    digits = secrets.token_bytes(DIGITS)
    names = bytes(challenge) + HELLO.pack(digits, caller, listener, b"")
    with contextlib.suppress(OSError):  # it may have left: then it does not answer
        connection.sendall(HELLO.pack(digits, caller, listener, code_of(key, b"caller", names)))
    answer = read(connection, HELLO_CODE)
    if answer is None or not hmac.compare_digest(answer, code_of(key, b"listener", names)):
        return None
    connection.settimeout(None)
    return names


def admit(connection: socket.socket, key: bytes, listener: int) -> tuple[int, bytes] | None:
    """Checks a caller of rank `listener`; returns its rank and the ends' names, as `introduce`; None for a stranger."""
    digits = secrets.token_bytes(DIGITS)
    connection.sendall(digits)
    if not _is_same_user(connection) or (hello := read(connection, HELLO.size)) is None:
        return None
    challenge, rank, meant, shown = HELLO.unpack(hello)
    names = digits + HELLO.pack(challenge, rank, meant, b"")
    if meant != listener or not hmac.compare_digest(shown, code_of(key, b"caller", names)):
        return None  # a port scanner, or a rank of another job that used this port before
    connection.sendall(code_of(key, b"listener", names))
    connection.settimeout(None)
    return rank, names


def _is_same_user(connection: socket.socket) -> bool:
    """True if the other end of a Unix socket is a process of this user, and across machines, where keys decide."""
    if connection.family != socket.AF_UNIX:
        return True
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


class Codes:
    """The codes of one connection's messages, each made from a message and its number, so that no message can be
    changed, repeated or omitted."""

    def __init__(self, key: bytes):
        self._key, self._number = key, itertools.count()

    def next(self, *message: Buffer) -> bytes:
        """Returns the code of the next message."""
        code = hmac.new(self._key, b"%d " % next(self._number), "sha256")
        for piece in message:
            code.update(piece)
        return code.digest()[:CODE]

    def check(self, code: Buffer | None, *message: Buffer) -> bool:
        """True if `code` is the next message's."""
        return code is not None and hmac.compare_digest(code, self.next(*message))


def read(connection: socket.socket, length: int) -> bytearray | None:
    """Reads exactly `length` bytes; returns None if the connection ends first."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        try:
            count = connection.recv_into(view)
        except OSError:
            return None
        if not count:
            return None
        view = view[count:]
    return data
