"""Serves the rendezvous at its port: a thread of node 0's process carries the nodes' messages and its decisions."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

from paddle_dp.launch.nodes.messages import BrokenLineError, Line, Message
from paddle_dp.launch.nodes.rendezvous import Member, Rendezvous, ranks_of

TICK = 0.2  # seconds between two looks
BEAT = 1.0  # seconds between two signs of life
ENTRY = 5.0  # seconds for a new connection to join
BACKLOG = 64  # connections that may be open without having joined; a new one closes the oldest
LINGER = 3.0  # seconds for the last messages to leave


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
        member = Member(int(message["node"]), host, name, ranks_of(message))
        refused = self.rendezvous.join(member, int(message["attempt"]))
        if refused is None:
            client.number = member.number
        else:
            self._tell(client, {"say": "refused", "why": refused[0], "later": refused[1]})

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
