"""Creates gloo groups reliably: each with a separate store, and only when all its ranks have arrived.

ProcessGroupGloo publishes its addresses under the keys "0", "1", … of its store, the same for every group. With one
store for the job, the second group reads the addresses of the first: hybrid jobs on 4 ranks started 0 times of 18.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import paddle
from paddle.base import core
from paddle.distributed import collective

from paddle_dp.errors import JobError, LostPeerError
from paddle_dp.gloo import originals
from paddle_dp.gloo.patch import GLOO, Patch, apply
from paddle_dp.gloo.time_limit import set_time_limit
from paddle_dp.mesh import transport
from paddle_dp.mesh.doors import Connections, listen_to_this_machine_only, send_at_once
from paddle_dp.mesh.environment import Environment, bound_socket, rank_host
from paddle_dp.mesh.secret import JobStore
from paddle_dp.mesh.transport import Patience

ATTEMPTS = 20


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yields a free port, reserved within the context, at which a store can listen.

    The kernel does not hand out the port of a bound socket; with SO_REUSEADDR on both (Paddle's store sets it), an
    explicit bind and listen at that port succeeds. Probing, closing and binding again would leave a gap in which
    another rank gets the port.
    """
    with bound_socket("", 0) as reservation:
        yield reservation.getsockname()[1]


@contextlib.contextmanager
def catchable_bind() -> Iterator[None]:
    """Within the context, a store that cannot bind raises ValueError; with libuv (3.x's default) it would abort."""
    flag = "FLAGS_tcp_store_using_libuv"
    before = paddle.get_flags([flag])
    paddle.set_flags({flag: False})
    try:
        yield
    finally:
        paddle.set_flags(before)


def open_store() -> tuple[Any, int]:
    """Returns a new store and its port; the store listens on all interfaces, or, in a job on one machine, on `lo`.

    Raises JobError when no store can be opened.
    """
    last_error: Exception | None = None
    for _ in range(ATTEMPTS):
        with reserved_port() as port, catchable_bind():
            try:
                store = core.TCPStore(rank_host(), port, True, 0)
            except (ValueError, RuntimeError, OSError) as error:  # taken on one interface only: try another
                last_error = error
                continue
        send_at_once()
        listen_to_this_machine_only(rank_host())
        return store, port
    raise JobError(
        f"no store could be opened at {rank_host()} in {ATTEMPTS} attempts; the last error was: {last_error}"
    )


def reach_store(host: str, port: int) -> Any:
    """Connects to the store that listens at `host`:`port`."""
    store = core.TCPStore(host, port, False, 0)
    send_at_once()
    return store


def named_barrier(store: Any, name: str, member: int, size: int, rank: int) -> None:
    """Returns when all `size` members have called it with this `name`, each once with its `member` number.

    Raises LostPeerError, naming the barrier, this rank and the missing members, after `Patience.seconds`.
    """
    store.add(f"{name}/member/{member}", 1)
    arrived, pause, end = store.add(f"{name}/arrived", 1), 0.001, time.monotonic() + Patience.seconds
    while arrived < size:
        if time.monotonic() > end:
            missing = [other for other in range(size) if not store.add(f"{name}/member/{other}", 0)]
            raise LostPeerError(
                f"{name}: rank {rank} (member {member} of 0 to {size - 1}) waited {Patience.seconds:g} s for members "
                f"{missing}. Did those ranks fail earlier, or take another branch of the program? See their logs."
            )
        time.sleep(pause)
        pause = min(pause * 1.5, 0.02)  # poll often at first, then every 20 ms
        arrived = store.add(f"{name}/arrived", 0)


_stores: list[Any] = []  # a group's store must outlive the group: its first rank serves the others
REUSE = 1 << 20  # above all of Paddle's group ids
# Counts the uses of each group id.
_uses: collections.defaultdict[int, Iterator[int]] = collections.defaultdict(itertools.count)


def create(store: Any, rank: int, size: int, group: int = 0) -> Any:
    """Creates a process group of `size` ranks; replaces ProcessGroupGloo.create. Collective.

    The group's first rank opens the group's store and writes its address into the job's store. gloo connects only after
    all ranks have met, so that its fixed 30 s limit starts when no rank is late.
    """
    here = Environment.read()
    send_at_once()
    transport.open_endpoint(store)
    store, number, connections = JobStore(store), _number(group), Connections()
    name = f"gloo group {group}" + (f" (made again, {number // REUSE})" if number >= REUSE else "")
    store.set(f"{name}/rank/{rank}", str(here.rank))
    if rank == 0:
        private, connections.port = open_store()
        store.set(f"{name}/address", f"{rank_host()}:{connections.port}")
    named_barrier(store, name, rank, size, here.rank)
    if rank:
        host, port_word = store.get(f"{name}/address").decode().rsplit(":", 1)
        private = reach_store(host, int(port_word))
    _stores.append(private)
    with connections.blamed():
        process_group = originals.original("create")(private, rank, size, number)
    set_time_limit(number, Patience.seconds)
    ranks = [int(store.get(f"{name}/rank/{other}")) for other in range(size)]
    originals.register(process_group, number, rank, ranks)
    # No rank continues, or ends, while a peer still needs the store to connect.
    originals.original("all_reduce")(process_group, paddle.ones([1]), core.ReduceOp.SUM, True).wait()
    connections.close_port()
    return process_group


def _number(group: int) -> int:
    """Returns a unique number for a process group. Paddle runs a second group of the same id (0 for a raw group) over
    the connections of the first, even if its members differ (3.3.1)."""
    use = next(_uses[group])
    if not use and group in collective._group_map:  # made before the bridge was installed
        use = next(_uses[group])
    return group + use * REUSE


def install() -> None:
    """Makes `create` create a script's groups; `join` calls it on CPUs. A second group of Paddle's reads the first
    one's keys, and read the right ones mostly while each call of a store took 40 ms."""
    originals.save()
    apply(patches())


def patches() -> Iterator[Patch]:
    yield Patch(
        GLOO, "create", staticmethod(create), "groups use the same store keys: the second hangs or dies"
    )
