"""A node's connection to the rendezvous, also node 0's: a thread keeps it up and collects its messages."""

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
SILENCE = 20.0  # seconds, until the rendezvous sends another value
STRANGER = "If another program has this port on node 0's machine, give another one on all nodes."
INBOX_KINDS = ("welcome", "waits", "prepare", "begin", "judge", "again", "leave")


class Membership:
    """Keeps this node connected to the rendezvous within `with Membership(address, hello, secret) as node:`.

    `hello` describes the node. `inbox` has the received messages, in order; {"say": "lost", "why": …} when the
    connection is gone, after which it connects again; and {"say": "refused", "why": …} if it must not.
    """

    def __init__(self, address: tuple[str, int], hello: Message, secret: bytes):
        self._address, self._hello, self._secret = address, hello, secret
        self.inbox: queue.Queue[Message] = queue.Queue()
        self.attempt = 0
        self.known = False  # True once the rendezvous has let this node in
        self._out: queue.Queue[Message] = queue.Queue()
        self._begun_attempt = 0  # the last attempt that this node was to begin
        self._ended = 0  # the last one that it was to end, or in which it lost its connection
        self._stops = (0, "")  # the last one that it was to stop, and why
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

    def begin(self, attempt: int) -> None:
        """Records that this node now takes part in an attempt."""
        self.attempt = attempt

    def must_end(self) -> bool:
        """True if the ranks of this attempt must end: another node's have failed, or node 0 is out of reach."""
        return self._ended >= self.attempt

    def must_stop(self) -> str:
        """Returns why the ranks of this attempt must stop in good order; "" while they need not."""
        attempt, why = self._stops
        return why if attempt == self.attempt else ""

    def send(self, **message: Any) -> None:
        """Sends a message within a moment; drops it without a connection."""
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
        """Keeps a connection until it breaks; returns the reason, or None if this node was not in yet."""
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
        except Exception as error:  # noqa: BLE001 - this thread reports any message that it cannot read
            self._refuse(
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
        """Reports that this node is not let in, and stops connecting."""
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
