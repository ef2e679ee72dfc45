"""Bytes from rank to rank over plain sockets: sends never block, and one queue per (group, source) keeps their order.

gloo's own send and recv block each other, and number their messages by a counter that differs between ranks as soon as
a group has three of them.
"""

from __future__ import annotations

import atexit
import collections
import os
import secrets
import socket
import struct
import threading
from typing import Any

from paddle_dp.errors import RunError
from paddle_dp.gloo.line import HEADER, Line
from paddle_dp.gloo.rendezvous import Patience, own_host
from paddle_dp.mesh.environment import Environment

TOKEN = 16  # bytes; a peer proves with it that it belongs to this job and found this listener
HELLO = struct.Struct(f"<{TOKEN}sq")  # the listener's token, the caller's rank
LAST_WORDS = 30.0  # seconds that an ending process gives its queued sends


class Carrier:
    """One process's post office: a listener, a connection to each peer it writes to, and boxes of what arrived."""

    def __init__(self, store: Any, rank: int):
        self.rank, self.store, self._pid = rank, store, os.getpid()
        self._token = secrets.token_bytes(TOKEN)
        self._listener = socket.create_server((own_host(), 0), backlog=64)
        self._arrived = threading.Condition()
        self._boxes: dict[tuple[int, int], collections.deque[bytearray]] = collections.defaultdict(
            collections.deque
        )
        self._gone: set[int] = set()
        self._lines: dict[int, Line] = {}
        host, port = self._listener.getsockname()[:2]
        store.set(f"carrier/{rank}", f"{host}:{port}:{self._token.hex()}")
        _thread(self._accept)
        atexit.register(self.settle)

    def send(self, group: int, rank: int, data: memoryview) -> None:
        """Writes or queues `data` (which the caller no longer changes) for a peer and returns."""
        if rank not in self._lines:
            self._lines[rank] = Line(self._call(rank))
        self._lines[rank].send(group, data)

    def take(self, group: int, rank: int) -> bytearray:
        """The next message of a peer in a group. Raises RunError when it is gone or patience ends."""
        box = self._boxes[group, rank]
        with self._arrived:
            self._arrived.wait_for(lambda: box or rank in self._gone, timeout=Patience.seconds)
            if box:
                return box.popleft()
        why = "has left the job" if rank in self._gone else f"sent nothing for {Patience.seconds:g} s"
        raise RunError(
            f"rank {self.rank} waits for rank {rank} in gloo group {group}, which {why}. See its log."
        )

    def settle(self) -> None:
        """Returns when everything queued has been written, or after 30 s: nothing sent may be lost at the exit."""
        if os.getpid() != self._pid:
            return  # a forked data worker: its copy of the queues has no threads to empty them
        for line in self._lines.values():
            line.settle(LAST_WORDS)

    def _call(self, rank: int) -> socket.socket:
        host, port, token = bytes(self.store.get(f"carrier/{rank}")).decode().rsplit(":", 2)
        line = socket.create_connection((host, int(port)), timeout=Patience.seconds)
        line.settimeout(None)
        line.sendall(HELLO.pack(bytes.fromhex(token), self.rank))
        return line

    def _accept(self) -> None:
        while True:
            line, _ = self._listener.accept()
            _thread(self._listen, line)

    def _listen(self, line: socket.socket) -> None:
        with line:
            hello = _read(line, HELLO.size)
            token, rank = HELLO.unpack(hello) if hello is not None else (b"", -1)
            if not secrets.compare_digest(token, self._token):
                return  # a port scanner, or a rank of another job that had this port before
            while (header := _read(line, HEADER.size)) is not None:
                group, length = HEADER.unpack(header)
                if (data := _read(line, length)) is None:
                    break
                with self._arrived:
                    self._boxes[group, rank].append(data)
                    self._arrived.notify_all()
            with self._arrived:
                self._gone.add(rank)
                self._arrived.notify_all()


def _thread(work: Any, *args: Any) -> None:
    threading.Thread(target=work, args=args, daemon=True).start()


def _read(line: socket.socket, length: int) -> bytearray | None:
    """Exactly `length` bytes, or None when the line ended before."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        try:
            count = line.recv_into(view)
        except OSError:
            return None
        if not count:
            return None
        view = view[count:]
    return data


_here: list[Carrier] = []


def open_here(store: Any) -> Carrier:
    """This process's carrier; the first call opens it and writes its address into the job's store."""
    if not _here:
        _here.append(Carrier(store, Environment.read().rank))
    return _here[0]


def here() -> Carrier:
    """This process's carrier, which the first group opened."""
    from paddle.base import core

    return _here[0] if _here else open_here(core.create_or_get_global_tcp_store())
