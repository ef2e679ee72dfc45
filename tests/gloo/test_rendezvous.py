"""A group's store opens without a gap to lose its port in, answers at once; a barrier names the missing."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from paddle_dp.errors import JobError
from paddle_dp.gloo import process_groups as rendezvous


class Counters(dict):  # type: ignore[type-arg]
    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return int(self[key])


def test_a_reserved_port_is_given_to_nobody_else() -> None:
    with rendezvous.reserved_port() as port:
        others = [socket.create_server(("", 0)) for _ in range(200)]
        assert port not in {other.getsockname()[1] for other in others}
        for other in others:
            other.close()
        with socket.create_server(("", port)):  # sets SO_REUSEADDR, as Paddle's store does
            pass


def test_a_store_opens_serves_and_answers_at_once() -> None:
    store, port = rendezvous.open_store()
    client = rendezvous.reach_store("127.0.0.1", port)
    store.set("key", "value")
    seconds = []
    for _ in range(20):
        begin = time.monotonic()
        assert bytes(client.get("key")) == b"value"
        seconds.append(time.monotonic() - begin)
    assert sorted(seconds)[4] < 0.03, "a get takes 90 ms while Nagle's delay is on"  # the quickest quarter


def test_a_taken_port_is_exchanged_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        offers = iter([taken.getsockname()[1]] * 3)
        real = rendezvous.reserved_port

        @contextlib.contextmanager
        def unlucky() -> Iterator[int]:
            with real() as port:
                yield next(offers, port)

        monkeypatch.setattr(rendezvous, "reserved_port", unlucky)
        _, port = rendezvous.open_store()
        assert port != taken.getsockname()[1]


def test_when_no_port_can_be_had_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        monkeypatch.setattr(
            rendezvous, "reserved_port", lambda: contextlib.nullcontext(taken.getsockname()[1])
        )
        with pytest.raises(JobError, match=r"no store could be opened at 127.0.0.1 in 20 attempts.*Bind"):
            rendezvous.open_store()


def test_the_flag_is_as_it_was_afterwards() -> None:
    import paddle

    flag = "FLAGS_tcp_store_using_libuv"
    before = paddle.get_flags([flag])
    with rendezvous.catchable_bind():
        assert paddle.get_flags([flag]) == {flag: False}
    assert paddle.get_flags([flag]) == before


def test_a_named_barrier_ends_when_the_last_member_has_arrived() -> None:
    store, through = Counters(), []

    def member(number: int) -> None:
        rendezvous.named_barrier(store, "meeting", number, 3, number)
        through.append(number)

    threads = [threading.Thread(target=member, args=(number,)) for number in range(3)]
    for thread in threads[:2]:
        thread.start()
    time.sleep(0.2)
    assert through == []
    threads[2].start()
    for thread in threads:
        thread.join(5)
    assert sorted(through) == [0, 1, 2]


def test_a_named_barrier_names_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.Patience, "seconds", 0.1)
    with pytest.raises(
        JobError, match=r"gloo group 7: rank 5 \(member 1 of 0 to 3\) waited 0.1 s for members \[0, 2, 3\]"
    ):
        rendezvous.named_barrier(Counters(), "gloo group 7", 1, 4, 5)
