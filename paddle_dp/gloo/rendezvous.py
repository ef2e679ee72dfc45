"""Race-free TCPStore creation, and a barrier that names the missing ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import paddle
from paddle.base import core

from paddle_dp.errors import JobError

ATTEMPTS = 20


class Patience:
    """How long a rank waits for a peer, in seconds; one for the process, set by `install`."""

    seconds = 600.0


def own_host() -> str:
    """The address at which the launcher says that other ranks can reach this one."""
    return os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rsplit(":", 1)[0]


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A free port that stays ours until the block ends, although somebody else is going to listen at it.

    A socket that is bound but does not listen keeps the kernel from giving the port to anyone who asks for any port;
    with SO_REUSEADDR on both (Paddle's store sets it), a named bind and listen at the same port succeeds. Probing,
    closing and binding again leaves a gap in which another rank of the same job gets the same port.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def catchable_bind() -> Iterator[None]:
    """Inside, a store that cannot bind raises ValueError; with libuv (3.x's default) it would abort the process."""
    flag = "FLAGS_tcp_store_using_libuv"
    try:
        before = paddle.get_flags([flag])
    except ValueError:  # 2.6 has no libuv
        yield
        return
    paddle.set_flags({flag: False})
    try:
        yield
    finally:
        paddle.set_flags(before)


def open_store() -> tuple[Any, int]:
    """A store of our own, listening on all interfaces, and its port. Raises JobError when none can be opened."""
    said: Exception | None = None
    for _ in range(ATTEMPTS):
        with reserved_port() as port, catchable_bind():
            try:
                store = core.TCPStore(own_host(), port, True, 0)
            except (ValueError, RuntimeError, OSError) as error:  # taken on one interface only: the next port
                said = error
                continue
        answer_at_once(port)
        return store, port
    raise JobError(
        f"no store could be opened at {own_host()} in {ATTEMPTS} attempts; the last one said: {said}"
    )


def reach_store(host: str, port: int) -> Any:
    """A connection to the store that listens at `host`:`port`."""
    store = core.TCPStore(host, port, False, 0)
    answer_at_once(port)
    return store


def answer_at_once(port: int) -> None:
    """Switches off Nagle's delay on this process's ends of a store: `get` takes 0.1 ms instead of 90 ms.

    Paddle writes a request in several small pieces, and each waits for the delayed acknowledgement of the one before.
    The sockets are the library's; TCP_NODELAY set through a duplicate holds for the original, and what a listening
    socket accepts inherits it.
    """
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            try:
                end = socket.socket(fileno=copy)
            except OSError:
                os.close(copy)  # a file, a pipe
                continue
            with end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and port in _ports(end):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _ports(end: socket.socket) -> set[int]:
    ports = {end.getsockname()[1]}
    with contextlib.suppress(OSError):  # a listening socket has no peer
        ports.add(end.getpeername()[1])
    return ports


def roll_call(store: Any, name: str, member: int, size: int, rank: int) -> None:
    """Returns when all `size` members have come to the meeting `name`; each calls it once, with its own number.

    Raises JobError, naming the meeting, this rank and the members that did not come, when patience ends.
    """
    store.add(f"{name}/member/{member}", 1)
    come, pause, end = store.add(f"{name}/come", 1), 0.001, time.monotonic() + Patience.seconds
    while come < size:
        if time.monotonic() > end:
            absent = [other for other in range(size) if not store.add(f"{name}/member/{other}", 0)]
            raise JobError(
                f"{name}: rank {rank} (member {member} of 0 to {size - 1}) waited {Patience.seconds:g} s for members "
                f"{absent}. Did those ranks fail earlier, or take another way through the program? See their logs."
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)  # soon while all are close, rarely while one is late
        come = store.add(f"{name}/come", 0)
