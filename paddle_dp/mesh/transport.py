"""Sends bytes between ranks over plain sockets: sends never block, one queue per (group, source) keeps their order.

`sockets` connects two ranks, and proves to each who the other is.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import struct
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paddle_dp.errors import LostPeerError
from paddle_dp.mesh.environment import Environment
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.secret import JobStore, code_of, job_key, seals
from paddle_dp.mesh.sockets import CODE, Codes, admit, introduce, keep_alive, listen, reach, read

ENTRY = 10.0  # seconds for a caller to send its code
STRANGERS = 16  # open connections without a code; the oldest is closed first
TRIES = 3  # attempts to connect, as strangers may crowd a caller out
HEADER = struct.Struct("<qQ")  # group, length
LAST_SENDS = 30.0  # seconds that an ending process waits for its queued sends


class Patience:
    """How many seconds this process waits for a peer, set by `join` or by the bridge's `install`."""

    seconds = 600.0


class Endpoint:
    """One process's endpoint: a listening socket, an outgoing connection per peer, an inbox per (group, source)."""

    def __init__(self, store: Any, rank: int, key: bytes = b"", single_machine: bool = True):
        self.rank, self.store, self._pid = rank, store, os.getpid()
        self._key, self._seals = key, bool(key) and not single_machine and seals()
        self._unproven: list[socket.socket] = []
        self.refused = 0  # number of strangers' connections
        self._listener, address = listen(single_machine)
        self._arrived = threading.Condition()
        self._inbox: dict[tuple[int, int], deque[bytearray]] = defaultdict(deque)
        self._gone: set[int] = set()
        self._incoming: dict[int, list[socket.socket]] = defaultdict(list)
        self._farewells: dict[str, Callable[[int], None]] = {}
        self._sent: Counter[tuple[int, int]] = Counter()  # messages, by (group, rank)
        self._received: Counter[tuple[int, int]] = Counter()
        self._answers: dict[int, Callable[[int, bytearray], None]] = {}
        self._keeps_alive, self._connecting = False, threading.Lock()
        self._outgoing: dict[int, Outgoing] = {}
        self._asking: dict[int, Outgoing] = {}
        store.set(f"endpoint/{rank}", address)
        _thread(self._accept)
        atexit.register(self._leave)

    def send(self, group: int, rank: int, *data: memoryview) -> None:
        """Writes or queues `data`, as one message, for a peer and returns; the caller must not change it afterwards.
        Does nothing if the peer's process has ended."""
        self._send(self._outgoing, group, rank, data)

    def ask(self, group: int, rank: int, *data: memoryview) -> None:
        """Sends a short message like `send`, over a separate connection, so that it does not wait for a long one: else
        each link would carry one direction at a time."""
        self._send(self._asking, group, rank, data)

    def _send(self, links: dict[int, Outgoing], group: int, rank: int, data: tuple[memoryview, ...]) -> None:
        if (outgoing := self._to(links, rank)) is None:
            return
        self._sent[group, rank] += 1
        if heartbeat.tape is not None:
            heartbeat.tape.send(group, rank, self._sent[group, rank])
        outgoing.send(group, *data)

    def connect(self, rank: int) -> None:
        """Connects to a peer unless connected; without this call the first message connects."""
        self._to(self._outgoing, rank)

    def _to(self, links: dict[int, Outgoing], rank: int) -> Outgoing | None:
        """Returns the connection to a peer; None if its process has ended and no longer listens."""
        # Looked up without the lock, which a thread that connects to another peer may hold.
        if rank in links:
            return links[rank]
        with self._connecting, contextlib.suppress(ConnectionError):
            if rank not in links:
                links[rank] = Outgoing(*self._connect(rank))
            return links[rank]
        with self._arrived:
            if self._incoming[rank]:
                return None  # its messages are still being read
        self._mark_gone(rank)
        return None

    def answer(self, group: int, answer: Callable[[int, bytearray], None]) -> None:
        """Calls `answer(rank, data)` from now on with each message of a group, first with waiting ones. The reading
        thread calls it, concurrently with this process's work, and never two threads for one rank."""
        with self._arrived:
            for (channel, rank), inbox in list(self._inbox.items()):
                while channel == group and inbox:
                    answer(rank, inbox.popleft())
            self._answers[group] = answer

    def receive(self, group: int, rank: int) -> bytearray:
        """Waits for the next message of a peer in a group and returns it. Raises LostPeerError when the peer is gone,
        or after `Patience.seconds`."""
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
        """True if a peer that had connected has left, or is dead."""
        return rank in self._gone

    def when_gone(self, user: str, farewell: Callable[[int], None]) -> None:
        """Calls `farewell(rank)` from now on when a peer is gone, in the thread that has read all its messages. Each
        `user` has one farewell, the last one given."""
        with self._arrived:
            self._farewells[user] = farewell

    def arrived(self, group: int, rank: int) -> bool:
        """True if a message of a peer has arrived, so that `receive` would not wait."""
        return bool(self._inbox[group, rank])

    @property
    def sent_bytes(self) -> int:
        """The bytes of all messages that this process has sent, also queued ones."""
        return sum(link.bytes for links in (self._outgoing, self._asking) for link in list(links.values()))

    def flush(self) -> None:
        """Returns when everything queued has been written, or after 30 s per peer, so that an exit loses no sends."""
        if os.getpid() != self._pid:
            return  # a forked data worker: its copy of the queues has no threads to empty them
        for links in (self._asking, self._outgoing):
            for rank, outgoing in links.items():
                if rank not in self._gone:
                    outgoing.flush(LAST_SENDS)

    def _leave(self) -> None:
        self.flush()
        if self.refused and os.getpid() == self._pid:
            line = f"rank {self.rank} refused {self.refused} connections that did not know the job's secret"
            print(line, file=sys.stderr, flush=True)

    def notice_silence(self) -> None:
        """From now on counts a peer as gone if its machine has not answered for about 20 s."""
        with self._arrived:
            self._keeps_alive = True
            for connection in itertools.chain(*self._incoming.values()):
                keep_alive(connection)

    def _connect(self, rank: int) -> tuple[socket.socket, bytes]:
        """Connects to a peer; returns the connection and the key of its codes. Raises ConnectionError if the peer no
        longer listens, or refuses TRIES attempts, and LostPeerError if its machine is not reached."""
        for attempt in range(TRIES):
            address = bytes(self.store.get(f"endpoint/{rank}")).decode()
            try:
                connection = reach(address, Patience.seconds)
            except ConnectionError:
                raise
            except OSError as error:
                why = f"at {address} ({error.strerror or error}). Is a firewall between their nodes?"
                raise LostPeerError(f"rank {self.rank} does not reach rank {rank} {why}") from error
            if (names := introduce(connection, self._key, self.rank, rank)) is not None:
                return connection, self._session(names)
            connection.close()
            time.sleep(0.1 * (attempt + 1))
        raise ConnectionError(f"rank {rank} does not let rank {self.rank} in")

    def _session(self, names: bytes) -> bytes:
        """Returns the key of a connection's codes, from its ends' names; b"" if its messages have none."""
        return code_of(self._key, b"session", names) if self._seals else b""

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(ENTRY)
                with self._arrived:
                    self._unproven.append(connection)
                _thread(self._read_messages, connection)
            except (OSError, RuntimeError):  # too many open files, or threads
                self._drop_strangers(0)
                time.sleep(0.05)
            self._drop_strangers(STRANGERS)

    def _drop_strangers(self, most: int) -> None:
        """Closes the oldest connections without a code; keeps `most` of them."""
        with self._arrived:
            for connection in self._unproven[: max(0, len(self._unproven) - most)]:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def _read_messages(self, connection: socket.socket) -> None:
        with connection:
            admitted = None
            with contextlib.suppress(OSError):
                admitted = admit(connection, self._key, self.rank)
            with self._arrived:
                self._unproven.remove(connection)
                self.refused += admitted is None
            if admitted is None:
                return
            rank, names = admitted
            with self._arrived:
                self._incoming[rank].append(connection)
                if self._keeps_alive:
                    keep_alive(connection)
            key = self._session(names)
            codes = Codes(key) if key else None
            while (header := read(connection, HEADER.size)) is not None:
                group, length = HEADER.unpack(header)
                began = time.monotonic()
                if (data := read(connection, length)) is None:
                    break
                if codes is not None and not codes.check(read(connection, CODE), header, data):
                    warning = f"rank {self.rank}: a message of rank {rank} was changed on its way: it counts as lost"
                    print(warning, file=sys.stderr, flush=True)
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
                    return  # messages of another connection are still being read
            self._mark_gone(rank)

    def _mark_gone(self, rank: int) -> None:
        """Marks a peer as gone and calls the farewells, once."""
        with self._arrived:
            if rank in self._gone:
                return
            self._gone.add(rank)
            self._arrived.notify_all()
            farewells = list(self._farewells.values())
        for farewell in farewells:
            farewell(rank)


class Outgoing:
    """A connection to one peer, which keeps the order of messages. `send` never blocks: bytes that do not fit into the
    socket's buffer are queued for a thread. `key` is the key of its codes."""

    def __init__(self, connection: socket.socket, key: bytes = b""):
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._changed, self._turn = connection, threading.Condition(), threading.Lock()
        self._codes = Codes(key) if key else None
        self._queue: deque[memoryview] = deque()
        self.bytes = 0  # of all messages, also queued ones
        self._broken = self._threaded = False

    def send(self, group: int, *data: memoryview) -> None:
        """Writes a message, or queues the bytes that do not fit; `data` must not be changed afterwards.

        Writing in the caller's thread is faster, and done even if the process is killed right after. Messages to a lost
        peer are dropped: `receive` raises the error.
        """
        with self._turn:
            message = [memoryview(HEADER.pack(group, sum(map(len, data)))), *data]
            self._put(message)
            if self._codes is not None and not self._broken:  # computed while the kernel sends the message
                self._put([memoryview(self._codes.next(*message))])

    def _put(self, message: list[memoryview]) -> None:
        with self._changed:
            self.bytes += sum(map(len, message))
            if not self._queue and not self._broken:
                message = self._write(list(message))
            self._queue.extend(message)
            if self._queue and not self._threaded:
                self._threaded = True
                _thread(self._drain)
            self._changed.notify_all()

    def flush(self, seconds: float) -> bool:
        """Waits until everything has been written, `seconds` at most; returns True if it has."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout=seconds)

    def _write(self, message: list[memoryview]) -> list[memoryview]:
        """Writes the bytes that fit into the socket's buffer and returns the others."""
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


def _thread(work: Callable[..., object], *args: Any) -> None:
    """Runs `work` in a thread. If it fails, the process ends with a traceback in its log: the other ranks would
    otherwise wait for ever."""

    def run() -> None:
        try:
            work(*args)
        except BaseException:  # noqa: BLE001 - any error ends the process
            if sys.is_finalizing():
                return
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    threading.Thread(target=run, daemon=True).start()


_endpoint: list[Endpoint] = []


def open_endpoint(store: Any) -> Endpoint:
    """Returns this process's endpoint; the first call opens it and publishes its address in the job's store."""
    if not _endpoint:
        here, jobs = Environment.read(), JobStore(store)
        _endpoint.append(Endpoint(jobs, here.rank, job_key(store), here.single_machine))
    return _endpoint[0]


def endpoint() -> Endpoint:
    """Returns this process's endpoint, which the first message opens."""
    if not _endpoint:
        from paddle.base import core

        open_endpoint(core.create_or_get_global_tcp_store())
    return _endpoint[0]


@dataclass
class Traffic:
    """Bytes sent since the process began: counted for this package's sockets. `collectives`: bytes of Paddle's process
    groups, computed for a ring, which sends the fewest (docs/exchange.md)."""

    collectives: float = 0.0

    def all_reduced(self, size: float, ranks: int) -> None:
        """Adds a sum of `size` bytes over `ranks` ranks."""
        self.collectives += 2 * (ranks - 1) / ranks * size

    def reduced(self, size: float, ranks: int) -> None:
        """Adds `size` bytes that were summed at one rank, gathered or scattered: each rank sends its part of them."""
        self.collectives += (ranks - 1) / ranks * size

    @property
    def sent(self) -> float:
        """All bytes that this process has sent."""
        return self.collectives + sum(local_endpoint.sent_bytes for local_endpoint in _endpoint)


traffic = Traffic()
