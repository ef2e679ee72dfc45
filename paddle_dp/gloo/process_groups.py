"""How gloo groups start: each with a store of its own, when everybody is there.

ProcessGroupGloo meets its peers under the keys "0", "1", … of whatever store it is given, the same for every group. In
the job's one store, the second group reads the addresses of the first: hybrid jobs on 4 ranks started 0 times of 18.
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

from paddle_dp.gloo import originals, transport
from paddle_dp.gloo.patch import Patch
from paddle_dp.gloo.rendezvous import (
    Patience,
    answer_at_once,
    open_store,
    own_host,
    reach_store,
    roll_call,
)
from paddle_dp.gloo.time_limit import wait_for
from paddle_dp.mesh.environment import Environment

_stores: list[Any] = []  # a group's store must outlive the group: its first rank serves the others
AGAIN = 1 << 20  # above all ids that Paddle deals out
_turns: collections.defaultdict[int, Iterator[int]] = collections.defaultdict(itertools.count)


def create(store: Any, rank: int, size: int, group: int = 0) -> Any:
    """A process group of `size` ranks that have all come; takes ProcessGroupGloo.create's place.

    The first of them opens the group's own store and writes its address into the job's; all meet; then gloo connects,
    whose fixed 30 s now count from a moment when nobody is late any more.
    """
    here = Environment.read()
    quicken_job_store()
    transport.open_endpoint(store)
    number = _number(group)
    name = f"gloo group {group}" + (f" (made again, {number // AGAIN})" if number >= AGAIN else "")
    store.set(f"{name}/rank/{rank}", str(here.rank))
    if rank == 0:
        private, port = open_store()
        store.set(f"{name}/address", f"{own_host()}:{port}")
    roll_call(store, name, rank, size, here.rank)
    if rank:
        host, port_word = bytes(store.get(f"{name}/address")).decode().rsplit(":", 1)
        private = reach_store(host, int(port_word))
    _stores.append(private)
    made = originals.own("create")(private, rank, size, number)
    wait_for(number, Patience.seconds)
    ranks = [int(bytes(store.get(f"{name}/rank/{other}")).decode()) for other in range(size)]
    originals.remember(made, number, rank, ranks)
    # A first word to everybody: nobody goes on, and nobody ends, while a peer still needs the store to connect.
    originals.own("all_reduce")(made, paddle.ones([1]), core.ReduceOp.SUM, True).wait()
    return made


def _number(group: int) -> int:
    """A number of its own for every process group: Paddle lets a second one of the same id (0, where a raw group names
    none) run over the connections of the first, whoever sits at their ends (3.3.1)."""
    turn = next(_turns[group])
    if not turn and group in collective._group_map:  # made before the bridge was there
        turn = next(_turns[group])
    return group + turn * AGAIN


@cache
def quicken_job_store() -> None:
    """Takes the 40 ms delays from the job's own store, once this process has joined it."""
    master = Environment.read().master
    if master:
        answer_at_once(int(master.rsplit(":", 1)[1]))


def patches() -> Iterator[Patch]:
    yield Patch(
        owner="paddle.base.core.ProcessGroupGloo", name="create", value=staticmethod(create),
        symptom="groups meet under the same store keys: the second hangs or dies",
    )  # fmt: skip
