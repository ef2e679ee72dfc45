"""Collectives of two and three processes over the device: right, asynchronous, and late on request."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from tests.ranks import run_ranks


def base(rank: int) -> Any:
    """What a rank brings."""
    return np.arange(6, dtype="float32") * (rank + 1) + 0.1


def joined() -> tuple[int, int]:
    """In a rank: on its device, in the job. Returns its number, and how many there are."""
    dist.init_parallel_env()
    return dist.get_rank(), dist.get_world_size()


def tensor(values: Any) -> paddle.Tensor:
    return paddle.to_tensor(np.asarray(values))


def total(values: Any) -> Any:
    """The sum in the order of the ranks."""
    return reduce(np.add, values)


def all_reduced(rank: int, ranks: int) -> tuple[Any, Any]:
    x = tensor(base(rank))
    dist.all_reduce(x)
    return x, total([base(other) for other in range(ranks)])


def maximum(rank: int, ranks: int) -> tuple[Any, Any]:
    x = tensor(base(rank))
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return x, np.max([base(other) for other in range(ranks)], 0)


def product(rank: int, ranks: int) -> tuple[Any, Any]:
    x = tensor(base(rank))
    dist.all_reduce(x, op=dist.ReduceOp.PROD)
    return x, reduce(np.multiply, [base(other) for other in range(ranks)])


def in_bfloat16(rank: int, ranks: int) -> tuple[Any, Any]:
    rounded = [tensor(base(other)).astype("bfloat16") for other in range(ranks)]
    wanted = tensor(total([one.astype("float32").numpy() for one in rounded])).astype("bfloat16")
    x = rounded[rank].clone()
    dist.all_reduce(x)
    return x.astype("float32"), wanted.astype("float32").numpy()


def of_whole_numbers(rank: int, ranks: int) -> tuple[Any, Any]:
    x = tensor(np.arange(5) + rank)
    dist.all_reduce(x)
    return x, total([np.arange(5) + other for other in range(ranks)])


def of_a_number(rank: int, ranks: int) -> tuple[Any, Any]:
    x = tensor(np.array(7.5, "float32"))
    dist.all_reduce(x)
    return x, np.float32(7.5 * ranks)


def broadcast(rank: int, ranks: int) -> tuple[Any, Any]:
    x = tensor(base(rank))
    dist.broadcast(x, src=1)
    return x, base(1)


def reduced(rank: int, ranks: int) -> tuple[Any, Any]:
    x = tensor(base(rank))
    dist.reduce(x, dst=1)
    return x, total([base(other) for other in range(ranks)]) if rank == 1 else x.numpy()


def gathered(rank: int, ranks: int) -> tuple[Any, Any]:
    found: list[Any] = []
    dist.all_gather(found, tensor(base(rank)))
    return paddle.stack(found), np.stack([base(other) for other in range(ranks)])


def gathered_in_one(rank: int, ranks: int) -> tuple[Any, Any]:
    found = paddle.zeros([6 * ranks])
    dist.stream.all_gather(found, tensor(base(rank)))
    return found, np.concatenate([base(other) for other in range(ranks)])


def reduce_scattered(rank: int, ranks: int) -> tuple[Any, Any]:
    found = paddle.zeros([6])
    dist.reduce_scatter(found, [tensor(base(rank) + 10 * other) for other in range(ranks)])
    return found, total([base(other) + np.float32(10 * rank) for other in range(ranks)])


def scattered(rank: int, ranks: int) -> tuple[Any, Any]:
    found = paddle.zeros([6])
    dist.scatter(found, [tensor(base(other)) for other in range(ranks)] if rank == 0 else None, src=0)
    return found, base(rank)


def sent(rank: int, ranks: int) -> tuple[Any, Any]:
    x = tensor(base(rank))
    if rank == 0:
        dist.send(x, dst=1)
    elif rank == 1:
        dist.recv(x, src=0)
    return x, base(0 if rank == 1 else rank)


def sent_both_ways(rank: int, ranks: int) -> tuple[Any, Any]:
    """More than a socket holds, in both directions at once."""
    own, found = paddle.full([1_000_000], float(rank + 1)), paddle.zeros([1_000_000])
    if rank > 1:
        return found, found.numpy()
    calls = [dist.P2POp(dist.isend, own, 1 - rank), dist.P2POp(dist.irecv, found, 1 - rank)]
    for task in dist.batch_isend_irecv(calls):
        task.wait()
    return found, np.full(1_000_000, 2.0 - rank, "float32")


def all_to_all(rank: int, ranks: int) -> tuple[Any, Any]:
    found: list[Any] = []
    dist.alltoall(found, [tensor(base(rank) + 100 * other) for other in range(ranks)])
    return paddle.stack(found), np.stack([base(other) + np.float32(100 * rank) for other in range(ranks)])


def all_to_all_in_one(rank: int, ranks: int) -> tuple[Any, Any]:
    found = paddle.zeros([ranks * 2, 3])
    dist.alltoall_single(found, tensor(np.full((ranks * 2, 3), rank, "float32")))
    return found[::2, 0], np.arange(ranks, dtype="float32")


def objects(rank: int, ranks: int) -> tuple[Any, Any]:
    found: list[Any] = []
    dist.all_gather_object(found, {"rank": rank})
    first = [{"rank": rank}]
    dist.broadcast_object_list(first, src=0)
    return tensor([one["rank"] for one in (*found, *first)]), np.array([*range(ranks), 0])


def of_a_part(rank: int, ranks: int) -> tuple[Any, Any]:
    group, x = dist.new_group([0, 1]), tensor(base(rank))
    if rank < 2:
        dist.all_reduce(x, group=group)
    return x, base(0) + base(1) if rank < 2 else base(rank)


CASES: tuple[Callable[[int, int], tuple[Any, Any]], ...] = (
    all_reduced, maximum, product, in_bfloat16, of_whole_numbers, of_a_number, broadcast, reduced, gathered,
    gathered_in_one, reduce_scattered, scattered, sent, sent_both_ways, all_to_all, all_to_all_in_one, objects,
    of_a_part,
)  # fmt: skip


def wrong() -> list[str]:
    """In a rank: the collectives that gave other numbers than they must."""
    rank, ranks = joined()
    found = []
    for case in CASES:
        got, wanted = case(rank, ranks)
        if not np.array_equal(got.numpy(), wanted):
            found.append(f"{case.__name__}: {got.numpy()} instead of {wanted}")
        dist.barrier()
    return found


def unwaited(size: int, bandwidth: float) -> dict[str, Any]:
    """In a rank: an all_reduce that is issued, read too early, and read after its wait."""
    os.environ["SIM_BANDWIDTH"] = str(bandwidth)
    rank, _ = joined()
    x = paddle.full([size], float(rank + 1))
    dist.barrier()
    begun = time.perf_counter()
    task = dist.all_reduce(x, sync_op=False)
    issued, done = time.perf_counter() - begun, task.is_completed()
    early = x[-1].item()
    task.wait()
    late = x[-1].item()
    return {
        "issued": issued, "done": done, "early": early, "late": late, "whole": time.perf_counter() - begun,
    }  # fmt: skip


def timed(path: str) -> None:
    """In a rank: one all-reduce of 1000 numbers, with SIM_TIMELINE."""
    os.environ["SIM_TIMELINE"] = path
    joined()
    dist.all_reduce(paddle.ones([1000]))
    paddle.device.synchronize()


def test_what_is_not_waited_for_is_not_there() -> None:
    """A link that needs 0.3 s for what is sent: the host goes on at once, and reads its own number until it waits."""
    found = run_ranks(unwaited, 2, 1_000_000, bandwidth=1.3e7)
    for rank, seen in enumerate(found):
        assert seen["issued"] < 0.2 and not seen["done"]
        assert (seen["early"], seen["late"]) == (rank + 1.0, 3.0)
        assert seen["whole"] > 0.25


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_gives_what_it_must(ranks: int) -> None:
    assert run_ranks(wrong, ranks) == [[]] * ranks


def test_each_collective_is_a_line_of_the_timeline(tmp_path: Path) -> None:
    run_ranks(timed, 2, str(tmp_path / "timeline"))
    for rank in range(2):
        began, ended, sent, received, _, what = (
            (tmp_path / f"timeline.{rank}").read_text().split("\n")[0].split()
        )
        assert float(began) < float(ended)
        assert (sent, received, what) == ("4000", "4000", "all_reduce")  # half of it scattered, half gathered
