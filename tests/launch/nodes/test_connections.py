"""Nodes that join a rendezvous over loopback: its port, its thread, and their own threads. No ranks."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from paddle_dp.launch.nodes import connections
from paddle_dp.launch.nodes.connections import BACKLOG, Membership, Server
from paddle_dp.launch.nodes.messages import BrokenLineError, Line
from paddle_dp.launch.nodes.rendezvous import NodeLimits, Rendezvous
from tests.eventually import eventually


class Place:
    def __init__(self, stack: ExitStack):
        self.stack, self.port = stack, 0

    def open(self, secret=b"", **limits) -> Server:
        server = Server(
            Rendezvous(NodeLimits(**{"least": 2, "most": 2, **limits})), ("127.0.0.1", self.port), secret
        )
        self.port = server.port
        return self.stack.enter_context(server)

    def node(self, number: int, secret=b"") -> Membership:
        card = {"node": number, "host": "127.0.0.1", "name": f"host{number}", "ranks": 1}
        return self.stack.enter_context(Membership(("127.0.0.1", self.port), card, secret))


@pytest.fixture
def place(monkeypatch) -> Iterator[Place]:
    for name, seconds in (("TICK", 0.005), ("BEAT", 0.02), ("RETRY_INTERVAL", 0.01)):
        monkeypatch.setattr(connections, name, seconds)
    with ExitStack() as stack:
        yield Place(stack)


def news(node: Membership, kind: str) -> dict:
    end = time.monotonic() + 5
    while True:
        try:
            message = node.inbox.get(timeout=max(end - time.monotonic(), 0.01))
        except queue.Empty:
            raise AssertionError(f"no {kind}") from None
        if message["say"] == kind:
            return message


def begin(place: Place) -> tuple[Membership, Membership]:
    nodes = place.node(0), place.node(1)
    prepare = news(nodes[0], "prepare")
    assert prepare["nodes"] == [[0, 1, "127.0.0.1"], [1, 1, "127.0.0.1"]]
    nodes[0].send(say="prepared", attempt=prepare["attempt"], ranks=[[0, 1], [1, 1]], master="127.0.0.1:1")
    for node in nodes:
        order = news(node, "begin")
        assert order["master"] == "127.0.0.1:1"
        node.attempt = order["attempt"]
    return nodes


def test_an_end_that_comes_before_its_attempt_has_begun_here_counts(place):
    """The order to begin may still wait in the news when the order to end it arrives."""
    place.open()
    nodes = place.node(0), place.node(1)
    prepare = news(nodes[0], "prepare")
    nodes[0].send(say="prepared", attempt=prepare["attempt"], ranks=[[0, 1], [1, 1]])
    nodes[0].attempt = news(nodes[0], "begin")["attempt"]
    nodes[0].send(say="ended", attempt=1, how="failed", words={"text": "at once"})
    order = news(nodes[1], "begin")
    eventually(lambda: nodes[1]._ended)
    nodes[1].attempt = order["attempt"]
    assert nodes[1].must_end()


def test_a_node_that_is_gone_ends_the_attempt_of_the_other(place):
    place.open()
    nodes = begin(place)
    nodes[1].__exit__()
    eventually(nodes[0].must_end)


def test_a_node_whose_rendezvous_is_gone_ends_its_attempt_and_comes_back(place):
    server = place.open()
    nodes = begin(place)
    nodes[0].__exit__()
    server.__exit__()
    assert "closed" in news(nodes[1], "lost")["why"] and nodes[1].must_end()
    place.open()
    eventually(lambda: nodes[1].connected)


def test_a_node_with_another_secret_is_told_so(place):
    place.open(secret=b"ours")
    node = place.node(1, secret=b"theirs")
    assert "the node that answers there has another secret" in news(node, "rejected")["why"]


ODD = [
    *(float("inf"), float("-inf"), float("nan"), -1, 1 << 70, 1e300, True, None),
    *("", "x", "9" * 4000, "\ud800", "\x1b[2J\n", "é" * 40_000),
    *([], [[1]], {}, {"failure": {}}),
]
MESSAGES = [
    {"say": "join", "attempt": 0, "node": 1, "host": "h", "name": "n", "ranks": 1},
    {"say": "quit", "status": 1, "why": "odd"},
    {"say": "offer", "ranks": 1},
    {"say": "tell", "attempt": 1, "words": "odd"},
    {"say": "prepared", "attempt": 1, "ranks": [[0, 1]]},
    {"say": "judged", "attempt": 1, "wait": None, "status": 1, "told": {}},
    {"say": "ended", "attempt": 1, "how": "failed", "age": 0.0, "words": {"step": 1}, "ranks": 1},
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["say"])
def test_whatever_a_stranger_says_the_rendezvous_goes_on(place, message):
    """Every field of a message with every odd value, said by somebody who joins, or has joined, in mid-attempt."""
    server = None
    for field in message:
        for value in ODD:
            if server is None or server.rendezvous.state == "over":  # a node that has joined may end the job
                place.port = 0
                server = place.open(least=1, most=2, rejoin=0.0)
                node = place.node(0)
                prepare = news(node, "prepare")
                node.send(say="prepared", attempt=prepare["attempt"], ranks=[[0, 1]])
                node.attempt = news(node, "begin")["attempt"]
            with socket.create_connection(("127.0.0.1", place.port)) as end, suppress(BrokenLineError):
                line = Line(end, b"", greets=False)
                if message is not MESSAGES[0]:
                    line.send(MESSAGES[0])
                line.send({**message, field: value})
                while not line.hear():  # sealed: it has ours as well
                    assert not server.failure, (field, value)
            with socket.create_connection(("127.0.0.1", place.port), timeout=5) as end:
                assert end.recv(1), "it greets the next one"
            assert not server.failure, (field, value)


def test_idle_strangers_keep_no_node_out(place):
    """64 idle connections did, for ten seconds and again."""
    server = place.open()
    idle = [socket.create_connection(("127.0.0.1", place.port)) for _ in range(3 * BACKLOG)]
    nodes = begin(place)
    assert sum(guest.number is None for guest in server._clients) <= BACKLOG
    assert all(node.connected for node in nodes)
    for end in idle:
        end.close()


def test_a_node_tells_of_its_memory_when_it_joins_and_again_when_it_comes_back(place):
    server, stocks = place.open(), iter([{"generations": [step]} for step in (5, 7, 9)])
    card = {"node": 1, "host": "127.0.0.1", "name": "host1", "ranks": 1}
    first = place.node(0)
    place.stack.enter_context(Membership(("127.0.0.1", place.port), card, b"", lambda: next(stocks)))
    assert news(first, "prepare")["memory"] == [[0, None], [1, {"generations": [5]}]]
    server.__exit__()
    place.open()
    assert news(first, "prepare")["memory"] == [[0, None], [1, {"generations": [7]}]]
