"""An outgoing connection that takes whatever it is given: what the kernel has no room for is written by a thread."""

from __future__ import annotations

import collections
import contextlib
import socket
import struct
import threading

HEADER = struct.Struct("<qQ")  # group, length


class Line:
    """Messages to one peer, in order. The caller never waits, and a thread starts only when something must wait."""

    def __init__(self, connection: socket.socket):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._changed = connection, threading.Condition()
        self._waiting: collections.deque[memoryview] = collections.deque()
        self._broken = self._threaded = False

    def send(self, group: int, data: memoryview) -> None:
        """Writes a message, or queues what does not fit; `data` must not be changed afterwards.

        Writing here and now is faster than by a thread, and holds even when the process ends without a farewell. To a
        peer that is gone nothing is written: whoever waits for it says so, a send has nothing to wait for.
        """
        with self._changed:
            message = [memoryview(HEADER.pack(group, len(data))), data]
            if not self._waiting and not self._broken:
                message = self._now(message)
            self._waiting.extend(message)
            if self._waiting and not self._threaded:
                self._threaded = True
                threading.Thread(target=self._drain, daemon=True).start()
            self._changed.notify_all()

    def settle(self, seconds: float) -> bool:
        """Whether everything has been written, after `seconds` at most."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout=seconds)

    def _now(self, message: list[memoryview]) -> list[memoryview]:
        """What is left of a message when the kernel takes no more."""
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
                self._changed.wait_for(lambda: bool(self._waiting))
                piece = self._waiting[0]
            if not self._broken:
                with contextlib.suppress(OSError):
                    self._connection.sendall(piece)
            with self._changed:
                self._waiting.popleft()  # only now: an empty queue means that all is written
                self._changed.notify_all()
