"""Bytes from rank to rank over plain sockets: sends never block, one queue per (group, source) keeps their order."""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from paddle_dp.errors import LostPeerError
from paddle_dp.mesh.environment import Environment, own_host
from paddle_dp.mesh.heartbeat import heartbeat

TOKEN = 16  # bytes of the secret by which a peer proves that it belongs to this job
HELLO = struct.Struct(f"<{TOKEN}sq")  # the listener's token, the caller's rank
HEADER = struct.Struct("<qQ")  # group, length
LAST_SENDS = 30.0  # seconds that an ending process waits for its queued sends

# Called with the group (`id`, `ranks`) of each exchange, returns a context to run it in. Nested exchanges are observed,
# too.
Observer = Callable[[Any], contextlib.AbstractContextManager[Any]]
observers: list[Observer] = []


@contextlib.contextmanager
def around(group: Any) -> Iterator[None]:
    """Runs an exchange along `group` inside every observer's context."""
    with contextlib.ExitStack() as contexts:
        for observer in observers:
            contexts.enter_context(observer(group))
        yield


class Patience:
    """How long a rank waits for a peer, in seconds; one for the process, set by `join` or by the bridge's `install`."""

    seconds = 600.0


class Endpoint:
    """One process's endpoint: a listening socket, an outgoing connection per peer, an inbox per (group, source)."""

    def __init__(self, store: Any, rank: int):
        self.rank, self.store, self._pid = rank, store, os.getpid()
        self._token = secrets.token_bytes(TOKEN)
        self._listener = socket.create_server((own_host(), 0), backlog=64)
        self._arrived = threading.Condition()
        self._inbox: dict[tuple[int, int], collections.deque[bytearray]] = collections.defaultdict(
            collections.deque
        )
        self._gone: set[int] = set()
        self._incoming: collections.defaultdict[int, list[socket.socket]] = collections.defaultdict(list)
        self._keeps_alive = False
        self._farewells: dict[str, Callable[[int], None]] = {}
        self._sent: collections.Counter[tuple[int, int]] = collections.Counter()  # messages, by (group, rank)
        self._received: collections.Counter[tuple[int, int]] = collections.Counter()
        self._answers: dict[int, Callable[[int, bytearray], None]] = {}
        self._connecting = threading.Lock()
        self._outgoing: dict[int, Outgoing] = {}
        self._asking: dict[int, Outgoing] = {}
        host, port = self._listener.getsockname()[:2]
        store.set(f"endpoint/{rank}", f"{host}:{port}:{self._token.hex()}")
        _thread(self._accept)
        atexit.register(self.flush)

    def send(self, group: int, rank: int, *data: memoryview) -> None:
        """Writes or queues `data`, as one message, for a peer and returns; the caller must not change it afterwards.
        For one whose process has ended it does nothing."""
        self._send(self._to(self._outgoing, rank), group, rank, data)

    def ask(self, group: int, rank: int, *data: memoryview) -> None:
        """As `send`, over a connection of its own, for a short message that shall not wait behind a long one: else what
        is asked for travels when what is answered has, and each link carries one direction at a time."""
        self._send(self._to(self._asking, rank), group, rank, data)

    def _send(self, outgoing: Outgoing | None, group: int, rank: int, data: tuple[memoryview, ...]) -> None:
        if outgoing is None:
            return
        self._sent[group, rank] += 1
        if heartbeat.tape is not None:
            heartbeat.tape.send(group, rank, self._sent[group, rank])
        outgoing.send(group, *data)

    def connect(self, rank: int) -> None:
        """Connects to a peer, if that is not done yet; else its first message does."""
        self._to(self._outgoing, rank)

    def _to(self, outgoing: dict[int, Outgoing], rank: int) -> Outgoing | None:
        """The connection to a peer; None: nobody listens any more, for its process has ended."""
        # Without waiting for another peer, which another thread may be connecting to.
        if rank in outgoing:
            return outgoing[rank]
        with self._connecting, contextlib.suppress(ConnectionError):
            if rank not in outgoing:
                outgoing[rank] = Outgoing(self._connect(rank))
            return outgoing[rank]
        with self._arrived:
            if self._incoming[rank]:
                return None  # what it has sent is still being read
        self._part_with(rank)
        return None

    def answer(self, group: int, answer: Callable[[int, bytearray], None]) -> None:
        """From now on `answer(rank, data)` is called with each message of a group, those that wait here first, whatever
        this process does meanwhile: in the thread that has read it, and not in two threads for one rank."""
        with self._arrived:
            for (channel, rank), inbox in list(self._inbox.items()):
                while channel == group and inbox:
                    answer(rank, inbox.popleft())
            self._answers[group] = answer

    def receive(self, group: int, rank: int) -> bytearray:
        """Waits for the next message of a peer in a group. Raises LostPeerError when the peer is gone, or after
        `Patience.seconds`."""
        inbox = self._inbox[group, rank]
        self._received[group, rank] += 1
        with self._arrived:
            if not inbox:
                which = f"message {group} {rank}", self._received[group, rank], False
                with heartbeat.waiting(f"a message from rank {rank}", which):
                    self._arrived.wait_for(lambda: inbox or rank in self._gone, timeout=Patience.seconds)
            if inbox:
                return inbox.popleft()
        why = "has left the job" if rank in self._gone else f"sent nothing for {Patience.seconds:g} s"
        raise LostPeerError(f"rank {self.rank} waits for a message of rank {rank}, which {why}. See its log.")

    def is_gone(self, rank: int) -> bool:
        """Whether a peer that had connected has left, or is dead."""
        return rank in self._gone

    def when_gone(self, whose: str, farewell: Callable[[int], None]) -> None:
        """From now on `farewell(rank)` is called when a peer is gone, in the thread that has read all that it sent. One
        for each user `whose`, the last one given."""
        with self._arrived:
            self._farewells[whose] = farewell

    def arrived(self, group: int, rank: int) -> bool:
        """Whether a message of a peer is there, so that `receive` would not wait."""
        return bool(self._inbox[group, rank])

    def flush(self) -> None:
        """Returns when everything queued has been written, or after 30 s, so that an exit loses no sends."""
        if os.getpid() != self._pid:
            return  # a forked data worker: its copy of the queues has no threads to empty them
        for of_peers in (self._asking, self._outgoing):
            for rank, outgoing in of_peers.items():
                if rank not in self._gone:
                    outgoing.flush(LAST_SENDS)

    def notice_silence(self) -> None:
        """From now on a peer whose machine has not answered for about 20 s is gone, although its connection is open."""
        with self._arrived:
            self._keeps_alive = True
            for connection in itertools.chain(*self._incoming.values()):
                _keep_alive(connection)

    def _connect(self, rank: int) -> socket.socket:
        host, port, token = bytes(self.store.get(f"endpoint/{rank}")).decode().rsplit(":", 2)
        connection = socket.create_connection((host, int(port)), timeout=Patience.seconds)
        connection.settimeout(None)
        connection.sendall(HELLO.pack(bytes.fromhex(token), self.rank))
        return connection

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            _thread(self._read_messages, connection)

    def _read_messages(self, connection: socket.socket) -> None:
        with connection:
            hello = _read(connection, HELLO.size)
            token, rank = HELLO.unpack(hello) if hello is not None else (b"", -1)
            if not secrets.compare_digest(token, self._token):
                return  # a port scanner, or a rank of another job that used this port before
            with self._arrived:
                self._incoming[rank].append(connection)
                if self._keeps_alive:
                    _keep_alive(connection)
            while (header := _read(connection, HEADER.size)) is not None:
                group, length = HEADER.unpack(header)
                began = time.monotonic()
                if (data := _read(connection, length)) is None:
                    break
                if (tape := heartbeat.tape) is not None:
                    tape.transfer(began, length)
                with self._arrived:
                    answer = self._answers.get(group)
                    if answer is None:
                        self._inbox[group, rank].append(data)
                        self._arrived.notify_all()
                if answer is not None:
                    answer(rank, data)
            with self._arrived:
                self._incoming[rank].remove(connection)
                if self._incoming[rank]:
                    return  # what it has sent over another one is still being read
            self._part_with(rank)

    def _part_with(self, rank: int) -> None:
        """A peer is gone."""
        with self._arrived:
            if rank in self._gone:
                return
            self._gone.add(rank)
            self._arrived.notify_all()
            farewells = list(self._farewells.values())
        for farewell in farewells:
            farewell(rank)


class Outgoing:
    """A connection to one peer; keeps the order of messages. `send` never blocks: what does not fit into the socket's
    buffer is queued for a thread, which is started when it is first needed."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._changed = connection, threading.Condition()
        self._queue: collections.deque[memoryview] = collections.deque()
        self.bytes = 0  # of messages that were given to it
        self._broken = self._threaded = False

    def send(self, group: int, *data: memoryview) -> None:
        """Writes a message, or queues what does not fit; `data` must not be changed afterwards.

        Writing in the caller's thread is faster than in another, and done even if the process is killed right after.
        Messages to a peer that is gone are dropped: `receive` raises the error.
        """
        with self._changed:
            length = sum(map(len, data))
            message = [memoryview(HEADER.pack(group, length)), *data]
            self.bytes += HEADER.size + length
            if not self._queue and not self._broken:
                message = self._write(message)
            self._queue.extend(message)
            if self._queue and not self._threaded:
                self._threaded = True
                _thread(self._drain)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until everything has been written, `seconds` at most; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout=seconds)

    def _write(self, message: list[memoryview]) -> list[memoryview]:
        """Writes what fits into the socket's buffer and returns the rest."""
        while message:
            try:
                sent = self._connection.sendmsg(message, (), socket.MSG_DONTWAIT)
            except BlockingIOError:
                return message
            except OSError:
                self._broken = True
                return []
            while message and sent >= len(message[0]):
                sent -= len(message.pop(0))
            if message:
                message[0] = message[0][sent:]
        return message

    def _drain(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._queue))
                piece = self._queue[0]
            began, size = time.monotonic(), len(piece)
            if not self._broken:
                with contextlib.suppress(OSError):
                    self._connection.sendall(piece)
            if (tape := heartbeat.tape) is not None:
                tape.transfer(began, size)
            with self._changed:
                self._queue.popleft()  # only now: an empty queue means that all is written
                self._changed.notify_all()


def _keep_alive(connection: socket.socket) -> None:
    """Has the kernel ask a silent peer whether it is there: after 10 s, and twice more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _thread(work: Any, *args: Any) -> None:
    threading.Thread(target=work, args=args, daemon=True).start()


def _read(connection: socket.socket, length: int) -> bytearray | None:
    """Exactly `length` bytes, or None when the connection ended first."""
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


_endpoint: list[Endpoint] = []


def open_endpoint(store: Any) -> Endpoint:
    """This process's endpoint; the first call opens it and publishes its address in the job's store."""
    if not _endpoint:
        _endpoint.append(Endpoint(store, Environment.read().rank))
    return _endpoint[0]


def sent_bytes() -> int:
    """The bytes of all messages that this process has sent."""
    return sum(
        outgoing.bytes
        for one in _endpoint
        for outgoing in (*list(one._outgoing.values()), *list(one._asking.values()))
    )


def endpoint() -> Endpoint:
    """This process's endpoint, which the first message opens."""
    if not _endpoint:
        from paddle.base import core

        open_endpoint(core.create_or_get_global_tcp_store())
    return _endpoint[0]
