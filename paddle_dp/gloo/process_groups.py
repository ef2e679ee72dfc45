"""Creates gloo groups reliably: each with a separate store, and only when all its ranks have arrived.

ProcessGroupGloo publishes its addresses under the keys "0", "1", … of its store, the same for every group. With one
store for the job, the second group reads the addresses of the first: hybrid jobs on 4 ranks started 0 times of 18.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import paddle
from paddle.base import core
from paddle.distributed import collective

from paddle_dp.gloo import originals
from paddle_dp.gloo.patch import Patch
from paddle_dp.gloo.rendezvous import disable_nagle, named_barrier, open_store, reach_store
from paddle_dp.gloo.time_limit import set_time_limit
from paddle_dp.mesh import transport
from paddle_dp.mesh.doors import Connections
from paddle_dp.mesh.environment import Environment, rank_host
from paddle_dp.mesh.secret import JobStore
from paddle_dp.mesh.transport import Patience

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
    quicken_job_store()
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


@cache
def quicken_job_store() -> None:
    """Removes the 40 ms delays of the job's store, once this process has joined it."""
    master = Environment.read().master
    if master:
        disable_nagle(int(master.rsplit(":", 1)[1]))


def patches() -> Iterator[Patch]:
    yield Patch(
        owner="paddle.base.core.ProcessGroupGloo", name="create", value=staticmethod(create),
        symptom="groups use the same store keys: the second hangs or dies",
    )  # fmt: skip
