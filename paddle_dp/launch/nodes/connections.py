"""Both ends of the nodes' connections: a node's, also node 0's, and the rendezvous' server in node 0's process."""

from __future__ import annotations

import contextlib
import queue
import select
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paddle_dp.launch import console
from paddle_dp.launch.nodes.messages import BrokenLineError, Line, Message, StrangerError
from paddle_dp.launch.nodes.rendezvous import Member, Rendezvous, ranks_of

BEAT = 1.0  # seconds between two signs of life
TICK = 0.2  # seconds between two looks
RETRY_INTERVAL = 0.5  # seconds between two tries to connect
SILENCE = 20.0  # seconds, until the rendezvous sends another value
STRANGER = "If another program has this port on node 0's machine, give another one on all nodes."
INBOX_KINDS = ("waits", "prepare", "begin", "judge", "again", "leave")
ENTRY = 5.0  # seconds for a new connection to join
BACKLOG = 64  # connections that may be open without having joined; a new one closes the oldest
LINGER = 3.0  # seconds for the last messages to leave


class Membership:
    """Keeps this node connected to the rendezvous within `with Membership(address, hello, secret) as node:`.

    `hello` describes the node as it is now, and `stock` the checkpoints in its memory. `inbox` has the received
    messages, in order; {"say": "lost", "why": …} when the connection is gone, after which it connects again; and
    {"say": "rejected", "why": …} if it must not.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hello: Message,
        secret: bytes,
        stock: Callable[[], Message | None] = lambda: None,
    ):
        self._address, self.hello, self._secret, self._stock = address, hello, secret, stock
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.attempt = 0  # the one in which this node takes part
        self.known = False  # True once the rendezvous has let this node in
        self.rejection = ""  # why it did not, when this node last asked
        self._out: queue.Queue[Message] = queue.Queue()
        self._begun_attempt = 0  # the last attempt that this node was to begin
        self._ended = 0  # the last one that it was to end, or in which it lost its connection
        self._stop_order = (0, "")  # the last one that it was to stop, and why
        self._over = threading.Event()
        self._silence = SILENCE
        self.connected = False  # True while connected and let in
        self._left = time.monotonic()  # when it was last connected, or first tried
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)

    def __enter__(self) -> Membership:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def alone(self) -> float:
        """Seconds since the rendezvous last had this node in; a silent connection counts as none."""
        return 0.0 if self.connected else time.monotonic() - self._left

    def must_end(self) -> bool:
        """True if the ranks of this attempt must end: another node's have failed, or node 0 is out of reach."""
        return self._ended >= self.attempt

    def must_stop(self) -> str:
        """Returns why the ranks of this attempt must stop in good order; "" while they need not."""
        attempt, why = self._stop_order
        return why if attempt == self.attempt else ""

    def send(self, **message: Any) -> None:
        """Sends a message within a moment; drops it without a connection."""
        self._out.put(message)

    def _run(self) -> None:
        memory = self._stock()  # now, as a connection must join soon
        while not self._over.is_set():
            try:
                end = socket.create_connection(self._address, timeout=2.0)
            except OSError:
                self._over.wait(RETRY_INTERVAL)
                continue
            why = self._keep(end, memory)
            if self._over.is_set():
                return
            if why is not None:
                self._ended = self._begun_attempt
                self.inbox.put({"say": "lost", "why": why})
                memory = self._stock()  # its newest complete checkpoint stays until the ranks meet again
            self._over.wait(RETRY_INTERVAL)

    def _keep(self, end: socket.socket, memory: Message | None) -> str | None:
        """Keeps a connection until it breaks; returns the reason, or None if this node was not in yet."""
        while not self._out.empty():  # of an earlier connection
            self._out.get()
        line: Line | None = None
        try:
            line = Line(end, self._secret, greets=False)
            line.send({"say": "join", "attempt": self.attempt, **self.hello, "memory": memory})
            why = self._talk(line)
            return why if self.connected else None
        except StrangerError as stranger:
            self._reject(f"{stranger}. {STRANGER}")
            return None
        except BrokenLineError as broken:
            return str(broken) if self.connected else None
        except Exception as error:  # noqa: BLE001 - this thread reports any message that it cannot read
            self._reject(
                f"this node cannot read the answers from there ({error!r}): is its paddle-dp of another version?"
            )
            return None
        finally:
            if self.connected:
                self._left = time.monotonic()
                self.connected = False
            (line or end).close()

    def _talk(self, line: Line) -> str | None:
        heard, beaten = time.monotonic(), 0.0
        while not self._over.is_set() or not self._out.empty():
            ready, _, _ = select.select([line], [], [], TICK)
            now = time.monotonic()
            for message in line.hear() if ready else ():
                heard = now
                if message["say"] == "rejected":
                    self.rejection = str(message["why"])
                    if not message.get("later"):
                        self._reject(f"node 0 does not let this node in: {message['why']}.")
                    return None
                self._take(message)
            if now - heard > self._silence:
                return f"nothing was heard of it for {now - heard:.0f} s (watch.node)"
            while not self._out.empty():
                line.send(self._out.get())
            if now - beaten > BEAT:
                beaten = now
                line.send({"say": "alive"})
        return None

    def _reject(self, why: str) -> None:
        """Reports that this node is not let in, and stops connecting."""
        self.inbox.put({"say": "rejected", "why": why})
        self._over.set()

    def _take(self, message: Message) -> None:
        kind = message["say"]
        if kind == "welcome":
            self._silence, self.known, self.connected = float(message["silence"]), True, True
        elif kind == "end":
            self._ended = int(message["attempt"])
        elif kind == "stop":
            self._stop_order = int(message["attempt"]), str(message["why"])
        elif kind == "told":
            console.write(str(message["words"]))
        elif kind in INBOX_KINDS:
            if kind == "begin":
                self._begun_attempt = int(message["attempt"])
            self.inbox.put(message)
        elif kind != "alive":
            raise ValueError(kind)


@dataclass(eq=False)
class _Client:
    line: Line
    since: float
    number: int | None = None


class Server:
    """Lets nodes join within `with Server(rendezvous, (host, port), secret):`. Raises OSError for a taken port."""

    def __init__(self, rendezvous: Rendezvous, address: tuple[str, int], secret: bytes):
        self.rendezvous, self._secret = rendezvous, secret
        self._clients: list[_Client] = []
        self._listener = socket.create_server(address, backlog=BACKLOG)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._looks = selectors.DefaultSelector()
        self._looks.register(self._listener, selectors.EVENT_READ)
        self._ends = threading.Event()
        self._beaten = 0.0
        self.failure = ""  # why the thread has ended too early
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread when the last messages have left, or LINGER seconds later."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:  # noqa: BLE001 - node 0 ends the job with it, as nodes must not wait for a dead thread
            self.failure = traceback.format_exc()
        finally:
            for client in self._clients:
                client.line.close()
            self._listener.close()
            self._looks.close()

    def _serve(self) -> None:
        end = None
        while end is None or (time.monotonic() < end and self._lingers()):
            if end is None and self._ends.is_set():
                end = time.monotonic() + LINGER
            for key, _ in self._looks.select(TICK):
                if key.fileobj is self._listener:
                    self._let_in()
                else:
                    self._listen(key.data)
            now = time.monotonic()
            self.rendezvous.look(now)
            self._pass_on()
            if now - self._beaten >= BEAT:
                self._beaten = now
                for client in list(self._clients):
                    self._tell(client, {"say": "alive"})
                    if client.number is None and now - client.since > ENTRY:
                        self._drop(client)

    def _lingers(self) -> bool:
        """True if a node has not received the end of the job yet: each closes its connection once it has."""
        return self.rendezvous.state == "over" and any(client.number for client in self._clients)

    def _let_in(self) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # too many open files, or the caller has left
            self._drop_strangers(0)
            return
        self._drop_strangers(BACKLOG - 1)
        try:
            client = _Client(Line(end, self._secret, greets=True), time.monotonic())
        except (BrokenLineError, OSError):
            end.close()
            return
        self._clients.append(client)
        self._looks.register(end, selectors.EVENT_READ, client)
        # A sealed message: the other end learns at once if its secret differs.
        self._tell(client, {"say": "alive"})

    def _drop_strangers(self, most: int) -> None:
        """Closes the oldest connections that have not joined; keeps `most` of them."""
        strangers = [client for client in self._clients if client.number is None]
        for client in strangers[: max(0, len(strangers) - most)]:
            self._drop(client)

    def _listen(self, client: _Client) -> None:
        if client not in self._clients:
            return
        try:
            messages = client.line.hear()
        except BrokenLineError as broken:
            self._drop(client, str(broken))
            return
        for message in messages:
            try:
                if client.number is not None:
                    self.rendezvous.heard(client.number, message, time.monotonic())
                elif message["say"] == "join":
                    self._join(client, message)
            except Exception as error:  # noqa: BLE001 - one node's bad message must not stop the others
                self._drop(client, f"it sent a message that node 0 cannot read ({error!r})")
            self._pass_on()

    def _join(self, client: _Client, message: Message) -> None:
        host, name = str(message["host"])[:64], str(message["name"])[:64]
        member = Member(int(message["node"]), host, name, ranks_of(message), memory=message.get("memory"))
        rejected = self.rendezvous.join(member, int(message["attempt"]))
        if rejected is None:
            client.number = member.number
        else:
            self._tell(client, {"say": "rejected", "why": rejected[0], "later": rejected[1]})

    def _pass_on(self) -> None:
        """Sends the rendezvous' orders, and closes the connections of nodes that it counts as lost."""
        orders, self.rendezvous.orders = self.rendezvous.orders, []
        by_number = {client.number: client for client in self._clients if client.number is not None}
        for number, message in orders:
            if number in by_number:
                self._tell(by_number[number], message)
        if self.rendezvous.state != "over":
            for number, client in by_number.items():
                if number not in self.rendezvous.members:
                    self._drop(client)

    def _tell(self, client: _Client, message: Message) -> None:
        if client not in self._clients:
            return
        try:
            client.line.send(message)
        except (BrokenLineError, ValueError) as broken:  # closed, or too long a message
            self._drop(client, str(broken))

    def _drop(self, client: _Client, why: str = "") -> None:
        if client not in self._clients:
            return
        self._clients.remove(client)
        with contextlib.suppress(KeyError, ValueError):
            self._looks.unregister(client.line)
        client.line.close()
        if client.number is not None:
            reason: dict[str, Any] = {"why": why} if why else {}
            self.rendezvous.leave(client.number, time.monotonic(), **reason)
