"""Lines between nodes: what is said arrives, and nobody without the secret can say anything."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.launch.nodes.messages import MAX_LINE_BYTES, BrokenLineError, Line, StrangerError
from paddle_dp.mesh.secret import users_secret


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as ear, socket.create_connection(ear.getsockname()) as one:
        other, _ = ear.accept()
        with other:
            yield one, other


def meet(ends, secret=b"", other_secret=b"") -> tuple[Line, Line]:
    one, other = Line(ends[0], secret, greets=False), Line(ends[1], other_secret, greets=True)
    time.sleep(0.005)
    assert one.hear() == other.hear() == []  # the digits
    return one, other


def heard(line: Line, least: int = 1, seconds: float = 2.0) -> list[dict]:
    found, end = [], time.monotonic() + seconds
    while len(found) < least and time.monotonic() < end:
        found += line.hear()
        time.sleep(0.001)
    return found


def test_what_is_said_arrives_in_order_both_ways(ends):
    one, other = meet(ends)
    for number in range(3):
        one.send({"say": "count", "number": number})
    other.send({"say": "welcome"})
    assert [message["number"] for message in heard(other, 3)] == [0, 1, 2]
    assert heard(one) == [{"say": "welcome"}]


def test_another_secret_is_noticed_by_both_ends(ends):
    one, other = meet(ends, b"ours", b"theirs")
    one.send({"say": "join"})
    other.send({"say": "alive"})
    for line in (one, other):
        with pytest.raises(StrangerError, match="the node that answers there has another secret"):
            heard(line)


def test_a_line_cannot_be_said_twice_or_by_the_other_end(ends):
    one = Line(ends[0], b"ours", greets=False)
    raw = ends[1]
    raw.setblocking(True)
    assert len(raw.recv(100)) == 33
    raw.sendall(b"0" * 32 + b"\n")
    one.send({"say": "alive"})
    one.hear()
    one.send({"say": "alive"})
    first, second = raw.recv(1000).split(b"\n")[:2]
    assert first.partition(b" ")[0] != second.partition(b" ")[0]  # the same words under another number
    raw.sendall(first + b"\n")  # sent back: its code is for the other direction
    with pytest.raises(StrangerError):
        heard(one)


@pytest.mark.parametrize(
    ("bytes_", "why"),
    [
        (b"GET / HTTP/1.1\r\n", "no node"),
        (b"x" * (MAX_LINE_BYTES + 2), "a line of more than"),
        (b"f" * 31 + b"\n", "no node"),
    ],
)
def test_who_speaks_otherwise_is_dropped(ends, bytes_, why):
    line = Line(ends[1], b"", greets=True)
    ends[0].sendall(bytes_)
    with pytest.raises(BrokenLineError, match=why):
        heard(line)


def test_a_closed_connection_is_an_error_after_its_last_words(ends):
    one, other = meet(ends)
    one.send({"say": "ended"})
    one.close()
    assert heard(other) == [{"say": "ended"}]
    with pytest.raises(BrokenLineError):
        heard(other)


def test_the_secret_is_a_variable_or_a_file(tmp_path):
    assert users_secret({}) == b""
    assert users_secret({"PADDLE_DP_SECRET": "abc"}) == b"abc"
    (tmp_path / "secret").write_text("of a file\n")
    assert users_secret({"PADDLE_DP_SECRET_FILE": str(tmp_path / "secret")}) == b"of a file"
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(UsageError, match="is empty"):
        users_secret({"PADDLE_DP_SECRET_FILE": str(tmp_path / "secret")})
    with pytest.raises(UsageError, match="cannot be read"):
        users_secret({"PADDLE_DP_SECRET_FILE": str(tmp_path / "none")})


def test_a_broken_line_does_not_take_the_messages_before_it(ends):
    one, other = meet(ends)
    one.send({"say": "failed"})
    ends[0].sendall(b"no code\n")
    time.sleep(0.005)
    assert other.hear() == [{"say": "failed"}]
    assert select.select([other], [], [], 0)[0]  # so the next call is not far
    for _ in range(2):
        with pytest.raises(StrangerError):
            other.hear()
