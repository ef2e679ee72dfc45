"""Bytes arrive whole, in order, from the right peer; strangers are ignored, and a lost peer has a name."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from paddle_dp.errors import JobError
from paddle_dp.mesh.transport import HEADER, Endpoint, Patience


class Store(dict):  # type: ignore[type-arg]
    """A job's store, in one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


@pytest.fixture
def pair() -> tuple[Endpoint, Endpoint]:
    store = Store()
    return Endpoint(store, 0), Endpoint(store, 1)


def say(endpoint: Endpoint, group: int, rank: int, word: bytes) -> None:
    endpoint.send(group, rank, memoryview(word))


def test_order_is_kept_in_each_group(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    for turn in range(50):
        say(zero, turn % 3, 1, b"%d" % turn)
    for group in (2, 0, 1):
        assert [int(one.receive(group, 0)) for _ in range(16)] == list(range(group, 48, 3))


def test_sends_do_not_wait_for_a_reader(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    large = bytes(range(256)) * 40_000  # more than any socket holds
    for _ in range(3):
        say(zero, 0, 1, large)
        say(one, 0, 0, large)
    assert all(bytes(one.receive(0, 0)) == large and bytes(zero.receive(0, 1)) == large for _ in range(3))


def test_small_messages_travel_at_once(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    begin = time.monotonic()
    for _ in range(50):
        say(zero, 0, 1, b"x" * 20_000)
        say(one, 0, 0, bytes(one.receive(0, 0)))
        zero.receive(0, 1)
    assert time.monotonic() - begin < 1.5, "each way seems to wait for a delayed acknowledgement"


def test_an_empty_message_is_one(pair: tuple[Endpoint, Endpoint]) -> None:
    say(pair[0], 0, 1, b"")
    say(pair[0], 0, 1, b"next")
    assert [bytes(pair[1].receive(0, 0)) for _ in range(2)] == [b"", b"next"]


def test_a_send_does_not_wait_while_another_peer_is_connected_to(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    zero.connect(1)
    with zero._connecting:  # as a thread does, up to `Patience.seconds` where a machine does not answer
        sender = threading.Thread(target=say, args=(zero, 0, 1, b"now"), daemon=True)
        sender.start()
        sender.join(timeout=5.0)
        assert not sender.is_alive()
    assert bytes(one.receive(0, 0)) == b"now"


def test_strangers_are_ignored(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    with socket.create_connection(one._listener.getsockname()[:2]) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100))
        say(zero, 0, 1, b"ours")
        assert bytes(one.receive(0, 0)) == b"ours"
    assert one._gone == set()


def test_a_peer_that_left_is_named(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    connection = zero._connect(1)
    connection.close()
    with pytest.raises(JobError, match=r"rank 1 waits for a message of rank 0, which has left"):
        one.receive(5, 0)


def test_what_a_peer_sent_before_it_left_still_counts(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    connection = zero._connect(1)
    connection.sendall(HEADER.pack(0, 4) + b"last")
    connection.close()
    assert bytes(one.receive(0, 0)) == b"last"


def test_patience_ends_with_names(pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Patience, "seconds", 0.1)
    with pytest.raises(JobError, match=r"rank 1 waits for a message of rank 0, which sent nothing for 0.1 s"):
        pair[1].receive(3, 0)


def test_flush_empties_the_queues(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    for _ in range(20):
        say(zero, 0, 1, bytes(500_000))
    zero.flush()
    assert not any(outgoing._queue for outgoing in zero._outgoing.values())
    assert sum(len(one.receive(0, 0)) for _ in range(20)) == 10_000_000


def test_a_question_does_not_wait_behind_what_is_being_read(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    reads, asked = threading.Event(), threading.Event()

    def read(rank: int, data: bytearray) -> None:
        reads.wait(10)

    one.answer(7, read)
    one.answer(8, lambda rank, data: asked.set())
    say(zero, 7, 1, b"long")
    zero.ask(8, 1, memoryview(b"question"))
    assert asked.wait(5), "the question waits for the message before it"
    reads.set()


def test_a_peer_is_gone_when_all_that_it_sent_is_read(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    gone = list[int]()
    one.when_gone("test", gone.append)
    zero.ask(8, 1, memoryview(b"question"))
    say(zero, 0, 1, b"first")
    one.receive(8, 0), one.receive(0, 0)
    zero._asking[1]._connection.shutdown(socket.SHUT_RDWR)
    time.sleep(0.05)
    say(zero, 0, 1, b"second")
    assert bytes(one.receive(0, 0)) == b"second" and gone == []
    zero._outgoing[1]._connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(JobError, match="which has left"):
        one.receive(0, 0)
    assert gone == [0]


def test_what_is_said_to_a_process_that_has_ended_before_is_lost_and_it_is_gone(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    """A server ended with «Connection refused» where a worker had died in its first pull."""
    zero, one = pair
    one._listener.close()
    store, left = zero.store, list[int]()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        store.set("endpoint/1", f"127.0.0.1:{nobody.getsockname()[1]}:{'00' * 16}")
    zero.when_gone("test", left.append)
    for _ in range(2):
        say(zero, 0, 1, b"x")
    assert zero.is_gone(1) and left == [1]
    with pytest.raises(JobError, match="rank 1, which has left the job"):
        zero.receive(0, 1)
