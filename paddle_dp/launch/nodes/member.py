"""A node's connection to the rendezvous, node 0's own too: a thread that keeps it up, and what was said over it."""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from typing import Any

from paddle_dp.launch import console
from paddle_dp.launch.nodes.messages import BrokenLineError, Line, Message, StrangerError

BEAT = 1.0  # seconds between two signs of life
TICK = 0.2  # seconds between two looks
RETRY_INTERVAL = 0.5  # seconds between two tries to connect
SILENCE = 20.0  # seconds, until the rendezvous has said how many
STRANGER = "If another program has this port on node 0's machine, give another one on all nodes."
INBOX_KINDS = ("welcome", "waits", "prepare", "begin", "judge", "again", "leave")


class Membership:
    """Within `with Membership(address, card, secret) as node:` this node is at the rendezvous, or tries to come there.

    `hello`: what it says of itself. `inbox` has what it was told, in order; and, of its own, {"say": "lost", "why": …}
    when the connection is gone, after which it tries to come back, and {"say": "refused", "why": …} where it may not.
    """

    def __init__(self, address: tuple[str, int], hello: Message, secret: bytes):
        self._address, self._hello, self._secret = address, hello, secret
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.attempt = 0
        self.known = False  # whether the rendezvous has ever let this node in
        self._out: queue.Queue[Message] = queue.Queue()
        self._begun_attempt = 0  # the last attempt that this node was told to begin
        self._ended = 0  # the last one that it was told to end, or lost its connection in
        self._stops = (0, "")  # the last one that it was asked to stop, and why
        self._over = threading.Event()
        self._silence = SILENCE
        self.connected = False  # and let in
        self._left = time.monotonic()  # when it was connected last, or began to try
        self._thread = threading.Thread(target=self._run, name="node", daemon=True)

    def __enter__(self) -> Membership:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def alone(self) -> float:
        """For how many seconds the rendezvous has not let this node in: one that accepts a connection and says nothing
        counts as one that is gone."""
        return 0.0 if self.connected else time.monotonic() - self._left

    def begin(self, attempt: int) -> None:
        """This node takes part in an attempt now."""
        self.attempt = attempt

    def must_end(self) -> bool:
        """Whether the ranks of this attempt are to be ended: somebody's have failed, or node 0 is out of reach."""
        return self._ended >= self.attempt

    def must_stop(self) -> str:
        """Why the ranks of this attempt are to stop in good order; "" while they are not."""
        attempt, why = self._stops
        return why if attempt == self.attempt else ""

    def send(self, **message: Any) -> None:
        """Sends a message, within a moment; to nobody where there is no connection."""
        self._out.put(message)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                end = socket.create_connection(self._address, timeout=2.0)
            except OSError:
                self._over.wait(RETRY_INTERVAL)
                continue
            why = self._keep(end)
            if self._over.is_set():
                return
            if why is not None:
                self._ended = self._begun_attempt
                self.inbox.put({"say": "lost", "why": why})
            self._over.wait(RETRY_INTERVAL)

    def _keep(self, end: socket.socket) -> str | None:
        """Keeps a connection until it breaks; why it did, or None where this node was not in yet."""
        while not self._out.empty():  # of an earlier connection
            self._out.get()
        line: Line | None = None
        try:
            line = Line(end, self._secret, greets=False)
            line.send({"say": "join", "attempt": self.attempt, **self._hello})
            why = self._talk(line)
            return why if self.connected else None
        except StrangerError as stranger:
            self._refuse(f"{stranger}. {STRANGER}")
            return None
        except BrokenLineError as broken:
            return str(broken) if self.connected else None
        except Exception as error:  # noqa: BLE001 - whatever the other end says, this thread tells what it was
            self._refuse(
                f"what answers there says what nobody understands ({error!r}): is its paddle-dp of another version?"
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
                if message["say"] == "refused":
                    if not message.get("later"):
                        self._refuse(f"node 0 does not let this node in: {message['why']}.")
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

    def _refuse(self, why: str) -> None:
        """This node may not come in: it does not try again."""
        self.inbox.put({"say": "refused", "why": why})
        self._over.set()

    def _take(self, message: Message) -> None:
        kind = message["say"]
        if kind == "welcome":
            self._silence, self.known, self.connected = float(message["silence"]), True, True
        elif kind == "begin":
            self._begun_attempt = int(message["attempt"])
        elif kind == "end":
            self._ended = int(message["attempt"])
        elif kind == "stop":
            self._stops = int(message["attempt"]), str(message["why"])
        elif kind == "told":
            console.write(str(message["words"]))
        if kind in INBOX_KINDS:
            self.inbox.put(message)
        elif kind not in ("alive", "end", "stop", "told"):
            raise ValueError(kind)
