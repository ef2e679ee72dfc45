"""Bytes arrive whole, in order, from the right peer; strangers are ignored, and a lost peer has a name."""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from paddle_dp.errors import JobError, LostPeerError
from paddle_dp.mesh.sockets import DIGITS, HELLO, Codes, reach
from paddle_dp.mesh.transport import HEADER, Endpoint, Patience
from tests.house.programs import ROOT, run_python, until
from tests.strangers import needs_another_user, stranger_is_well

KEY = b"a key"


class Store(dict):  # type: ignore[type-arg]
    """A job's store, in one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()


@pytest.fixture(params=["one machine", "two machines"])
def pair(request: pytest.FixtureRequest) -> tuple[Endpoint, Endpoint]:
    store, here = Store(), request.param == "one machine"
    return Endpoint(store, 0, KEY, here), Endpoint(store, 1, KEY, here)


@pytest.fixture
def machines() -> tuple[Endpoint, Endpoint]:
    """Two endpoints on two machines."""
    store = Store()
    return Endpoint(store, 0, KEY, False), Endpoint(store, 1, KEY, False)


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
    """The quickest quarter is judged, whatever else the machine does; the first messages are acknowledged at once."""
    zero, one = pair
    seconds = []
    for _ in range(50):
        begin = time.monotonic()
        say(zero, 0, 1, b"x" * 20_000)
        say(one, 0, 0, bytes(one.receive(0, 0)))
        zero.receive(0, 1)
        seconds.append(time.monotonic() - begin)
    assert sorted(seconds[26:])[5] < 0.03, "each way seems to wait 40 ms for a delayed acknowledgement"


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
    with reach(one.store["endpoint/1"].decode(), 10.0) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100))
        say(zero, 0, 1, b"ours")
        assert bytes(one.receive(0, 0)) == b"ours"
    assert one._gone == set()


def test_a_peer_that_left_is_named(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    connection, _ = zero._connect(1)
    connection.close()
    with pytest.raises(JobError, match=r"rank 1 waits for a message of rank 0, which has left"):
        one.receive(5, 0)


def test_what_a_peer_sent_before_it_left_still_counts(pair: tuple[Endpoint, Endpoint]) -> None:
    zero, one = pair
    connection, key = zero._connect(1)
    message = HEADER.pack(0, 4) + b"last"
    connection.sendall(message + (Codes(key).next(message) if key else b""))
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
    """A server ended with "Connection refused" where a worker had died in its first pull."""
    zero, one = pair
    one._listener.close()
    store, left = zero.store, list[int]()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        store.set("endpoint/1", f"127.0.0.1:{nobody.getsockname()[1]}")
    zero.when_gone("test", left.append)
    for _ in range(2):
        say(zero, 0, 1, b"x")
    assert zero.is_gone(1) and left == [1]
    with pytest.raises(JobError, match="rank 1, which has left the job"):
        zero.receive(0, 1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EHOSTUNREACH, "No route to host"), "No route to host"),
        (TimeoutError("timed out"), "timed out"),
    ],
)
def test_a_port_that_a_firewall_closes_has_the_names_of_both_ranks(
    machines: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch, error: OSError, reason: str
) -> None:
    """The rank ended with "[Errno 113] No route to host", of nobody and nowhere."""
    zero, _ = machines
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=error))
    address = zero.store["endpoint/1"].decode()
    names = f"rank 0 does not reach rank 1 at {address} ({reason}). Is a firewall between their nodes?"
    with pytest.raises(LostPeerError, match=f"^{re.escape(names)}"):
        say(zero, 0, 1, b"x")


def test_who_has_another_key_comes_in_at_neither_end(machines: tuple[Endpoint, Endpoint]) -> None:
    zero, one = machines
    stranger = Endpoint(Store(zero.store), 0, b"another key", False)
    with pytest.raises(ConnectionError, match="rank 1 does not let rank 0 in"):
        stranger._connect(1)
    zero.store.set("endpoint/0", stranger.store["endpoint/0"].decode())  # who listens has another one
    with pytest.raises(ConnectionError):
        one._connect(0)
    assert not one._gone and one.refused


def test_the_listener_is_the_rank_that_is_meant(pair: tuple[Endpoint, Endpoint]) -> None:
    third = Endpoint(Store(pair[0].store), 2, KEY, not pair[0]._seals)
    third.store.set("endpoint/0", third.store["endpoint/1"].decode())
    with pytest.raises(ConnectionError, match="rank 0 does not let rank 2 in"):
        third._connect(0)


@pytest.mark.parametrize("change", ["a byte", "left out", "repeated"])
def test_a_message_that_is_changed_on_its_way_is_not_read(
    machines: tuple[Endpoint, Endpoint], change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    zero, one = machines
    connection, key = zero._connect(1)
    codes, lines = Codes(key), []
    for word in (b"first", b"second"):
        header = HEADER.pack(0, len(word))
        lines.append(header + word + codes.next(header, word))
    sent = {
        "a byte": [lines[0].replace(b"first", b"fIrst")],
        "left out": [lines[1]],
        "repeated": [lines[0], lines[0]],
    }
    connection.sendall(b"".join(sent[change]))
    if change == "repeated":
        assert bytes(one.receive(0, 0)) == b"first"
    with pytest.raises(JobError, match="which has left"):
        one.receive(0, 0)
    assert "a message of rank 0 was changed on its way" in capsys.readouterr().err


def test_messages_carry_no_code_where_they_need_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDLE_DP_SEAL", "off")
    store = Store()
    zero, one = Endpoint(store, 0, KEY, False), Endpoint(store, 1, KEY, False)
    say(zero, 0, 1, b"word")
    assert bytes(one.receive(0, 0)) == b"word" and zero._outgoing[1].bytes == HEADER.size + 4


def odd_beginnings() -> list[bytes]:
    """What a stranger may say first."""
    hello = HELLO.pack(bytes(DIGITS), 0, 1, bytes(32))
    return [b"", b"x", bytes(1 << 16), b"\xff" * HELLO.size, hello, hello[:-1], b"GET / HTTP/1.0\r\n\r\n"]


def test_odd_beginnings_are_refused_and_counted(machines: tuple[Endpoint, Endpoint]) -> None:
    zero, one = machines
    odd = odd_beginnings() * 4  # 7 kinds: more than may be open at a time
    for beginning in odd:
        with reach(one.store["endpoint/1"].decode(), 10.0) as stranger:
            stranger.sendall(beginning)
    say(zero, 0, 1, b"ours")
    assert bytes(one.receive(0, 0)) == b"ours" and not one._gone
    until(lambda: one.refused == len(odd))
    assert not one._unproven


def test_idle_strangers_do_not_deafen_a_rank() -> None:
    """At `ulimit -n 64`, 60 idle connections ended the thread that accepts, and nobody was heard any more."""
    command = ["bash", "-c", 'ulimit -n 64; exec "$0" -c "$1"', sys.executable, DEAF]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank,
        contextlib.ExitStack() as idle,
    ):
        assert rank.stdout is not None
        store = Store()
        store.set("endpoint/1", rank.stdout.readline().strip())
        for _ in range(80):
            idle.enter_context(reach(store["endpoint/1"].decode(), 10.0))
        say(Endpoint(store, 0, KEY, False), 0, 1, b"ours")
        assert rank.stdout.readline() == "heard b'ours'\n"


DEAF = """
import sys; sys.path[0] = "."
from tests.mesh.test_transport import KEY, Store
from paddle_dp.mesh.transport import Endpoint
store = Store()
one = Endpoint(store, 1, KEY, False)
print(store["endpoint/1"].decode(), flush=True)
print("heard", bytes(one.receive(0, 0)), flush=True)
"""


def test_a_thread_that_fails_ends_its_process_with_the_cause() -> None:
    code = "from paddle_dp.mesh.transport import _thread; import time; _thread(lambda: {}[7]); time.sleep(30)"
    assert "KeyError: 7" in run_python("-c", code, timeout=20, status=1).stderr


@needs_another_user
def test_another_user_cannot_connect_on_one_machine() -> None:
    store = Store()
    Endpoint(store, 0, KEY)
    assert not stranger_is_well(lambda: reach(store["endpoint/0"].decode(), 10.0))
    assert reach(store["endpoint/0"].decode(), 10.0)


def test_nothing_of_a_socket_is_left_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Endpoint(Store(), 0, KEY)
    assert not list(tmp_path.iterdir())
