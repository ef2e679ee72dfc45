"""Messages between nodes: JSON lines of bounded size, each with a code that only holders of the job's secret can make.

Each end begins with a line of random digits. After it a line is its HMAC-SHA256 in hex, a space, and a JSON object. The
code covers both ends' digits, the direction and the line's number: without the secret, a line cannot be made, repeated
or dropped unnoticed. Lines are not encrypted; without a secret the codes only find mistakes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
from typing import Any

from paddle_dp.mesh.secret import SECRET, SECRET_FILE

MAX_LINE_BYTES = 1 << 18  # bytes of a line; a failure with its traceback is the longest message
UNSENT = 1 << 20  # bytes that may wait for a peer that does not read
CLOSED = "the connection was closed"
DIGITS = 32  # in each end's first line

Message = dict[str, Any]


class BrokenLineError(Exception):
    """The connection has ended, or its other end breaks the protocol; the message gives the reason."""


class StrangerError(BrokenLineError):
    """The other end is no node of this job."""


class Line:
    """One end of a connection, which never blocks. `greets` is true at the end that accepted the connection."""

    def __init__(self, end: socket.socket, secret: bytes, greets: bool):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end, self._secret, self._greets = end, secret, greets
        self._nonce, self._key = os.urandom(DIGITS // 2).hex(), b""
        self._sent, self._heard = 0, 0  # sealed lines in each direction
        self._in, self._out = b"", self._nonce.encode() + b"\n"
        self._error: BrokenLineError | None = None  # of the received bytes
        self._before: list[Message] = []  # messages to send once the other end's digits arrive
        self.flush()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Message) -> None:
        """Sends a message, now or with a later `flush`. Raises BrokenLineError."""
        if not self._key:
            self._before.append(message)
            return
        text = json.dumps(message, separators=(",", ":")).encode()
        if len(text) > MAX_LINE_BYTES - 80:
            raise ValueError(f"a message of {len(text)} bytes")
        self._out += self._code(self._greets, self._sent, text) + b" " + text + b"\n"
        self._sent += 1
        if len(self._out) > UNSENT:
            raise BrokenLineError("the other end does not read")
        self.flush()

    def flush(self) -> None:
        """Sends waiting bytes without blocking. Raises BrokenLineError."""
        try:
            while self._out:
                self._out = self._out[self._end.send(self._out) :]
        except BlockingIOError:
            return
        except OSError as error:
            raise _broken(error) from error

    def hear(self) -> list[Message]:
        """Returns the received messages. Raises BrokenLineError if the other end has closed, or breaks the protocol:
        the next call does, if valid messages came before."""
        messages: list[Message] = []
        try:
            self._receive(messages)
        except BrokenLineError as error:
            if not messages:
                raise
            self._error = error
            with contextlib.suppress(OSError):  # it stays readable, so that the next call comes at once
                self._end.shutdown(socket.SHUT_RD)
        return messages

    def _receive(self, messages: list[Message]) -> None:
        """Appends the received messages. Raises BrokenLineError after those that are valid."""
        if self._error is not None:
            raise self._error
        try:
            while chunk := self._end.recv(1 << 16):
                self._in += chunk
                if len(self._in) > 4 * MAX_LINE_BYTES:
                    break
            else:
                raise BrokenLineError(CLOSED)
        except BlockingIOError:
            pass
        except OSError as error:
            raise _broken(error) from error
        finally:
            *lines, self._in = self._in.split(b"\n")
            for line in lines:
                if (message := self._open(line)) is not None:
                    messages.append(message)
        if len(self._in) > MAX_LINE_BYTES:
            raise BrokenLineError(f"a line of more than {MAX_LINE_BYTES} bytes")

    def close(self) -> None:
        self._end.close()

    def _open(self, line: bytes) -> Message | None:
        """Returns a line's message; None for the first line, the digits."""
        if not self._key:
            if len(line) != DIGITS or line.strip(b"0123456789abcdef"):
                raise StrangerError("the program that answers there is no node of paddle-dp")
            both = [self._nonce.encode(), line]
            first, second = both if self._greets else both[::-1]
            self._key = hmac.digest(self._secret, b"paddle_dp nodes " + first + second, hashlib.sha256)
            waiting, self._before = self._before, []
            for message in waiting:
                self.send(message)
            return None
        code, _, text = line.partition(b" ")
        if not hmac.compare_digest(code, self._code(not self._greets, self._heard, text)):
            raise StrangerError(f"the node that answers there has another secret ({SECRET}, {SECRET_FILE})")
        self._heard += 1
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BrokenLineError("a line that is no JSON") from error
        if not isinstance(message, dict) or not isinstance(message.get("say"), str):
            raise BrokenLineError("a line that is no message")
        return message

    def _code(self, by_greeter: bool, number: int, text: bytes) -> bytes:
        code = hmac.digest(self._key, b"%d %d " % (by_greeter, number) + text, hashlib.sha256)
        return code.hex().encode()


def _broken(error: OSError) -> BrokenLineError:
    closed = isinstance(error, ConnectionResetError | BrokenPipeError)
    return BrokenLineError(CLOSED if closed else error.strerror or str(error))
