"""Point-to-point among four ranks: any order of posting, all types, views, blocks, parts; and a patient barrier."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gloo.cases import joined
from tests.ranks import run_ranks


def exchanges() -> dict[str, Any]:
    """One result per kind of exchange, as this rank sees it."""
    import paddle
    import paddle.distributed as dist

    mesh = joined()
    rank, after, before = mesh.rank, (mesh.rank + 1) % mesh.ranks, (mesh.rank - 1) % mesh.ranks
    found: dict[str, Any] = {}

    def tensor(value: float, kind: str = "float32") -> Any:
        return paddle.full([2, 2], value).astype(kind)

    for kind in ("float32", "float16", "bfloat16", "int64", "bool", "int16"):  # everybody sends first
        dist.send(tensor(rank + 1, kind), after)
        dist.recv(got := tensor(0, kind), before)
        found[kind] = got.astype("float32").flatten().tolist()
    received = [tensor(0) for _ in range(3)]
    tasks = [dist.irecv(one, before) for one in received]
    for number in range(3):
        dist.isend(tensor(10 * rank + number), after).wait()
    for task in reversed(tasks):  # waiting in another order than posting
        task.wait()
    found["order"] = [one[0, 0].item() for one in received]
    got, other = tensor(0), tensor(0)
    ops = [dist.P2POp(dist.irecv, got, before), dist.P2POp(dist.irecv, other, after)]
    ops += [dist.P2POp(dist.isend, tensor(rank), after), dist.P2POp(dist.isend, tensor(rank + 100), before)]
    for task in dist.batch_isend_irecv(ops):
        task.wait()
    found["block"] = [got[0, 0].item(), other[0, 0].item()]
    whole = paddle.zeros([4, 2])
    dist.send(tensor(rank), after)
    dist.recv(whole[1:3], before)
    found["view"] = whole[:, 0].tolist()
    changed = tensor(rank)
    dist.isend(changed, after)
    changed.fill_(-1.0)  # a send has taken its copy
    dist.recv(got, before)
    found["copy"] = got[0, 0].item()
    return found


def test_exchanges_among_four() -> None:
    for rank, found in enumerate(run_ranks(exchanges, 4, timeout=120)):
        before, after = (rank - 1) % 4, (rank + 1) % 4
        for kind in ("float32", "float16", "bfloat16", "int64", "int16"):
            assert found[kind] == [before + 1.0] * 4, kind
        assert found["bool"] == [1.0] * 4
        assert found["order"] == [10 * before + number for number in range(3)]
        assert found["block"] == [before, after + 100]
        assert found["view"] == [0, before, before, 0]
        assert found["copy"] == before


def parts() -> list[Any]:
    """A tensor sent in halves by fleet's partial calls and put together again, over a group of its own."""
    import paddle
    import paddle.distributed as dist

    mesh = joined()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across, beside = pairs[mesh.rank % 2].process_group, halves[mesh.rank // 2].process_group
    whole = paddle.arange(8, dtype="float32").reshape([4, 2])
    index = mesh.rank % 2
    if mesh.rank < 2:
        across.send_partial_on_calc_stream(whole, 1, 2, index)
        return [whole.tolist()]
    received = paddle.zeros([4, 2])
    across.recv_partial_on_calc_stream(received, 0, 2, index)
    part = received.flatten().tolist()
    beside.all_gather_partial_on_calc_stream(received, received, 2, index)
    return [received.tolist(), part]


def test_partial_send_and_receive() -> None:
    first, _, third, fourth = run_ranks(parts, 4, timeout=90)
    assert third[0] == fourth[0] == first[0]
    assert third[1] == [0, 1, 2, 3] * 2 and fourth[1] == [4, 5, 6, 7] * 2


def disagree() -> str:
    import paddle
    import paddle.distributed as dist

    if joined().rank == 0:
        dist.send(paddle.ones([3]), 1)
        return ""
    try:
        dist.recv(paddle.ones([2]), 0)
    except ValueError as error:
        return str(error)
    return "taken"


def test_two_ends_that_disagree_are_told() -> None:
    said = run_ranks(disagree, 2, timeout=60)[1]
    assert "rank 0 sent 12 bytes" in said and "[2] of paddle.float32" in said


def barrier_with_one_late(seconds: float) -> float:
    import paddle.distributed as dist

    mesh = joined()
    dist.barrier()
    begin = time.monotonic()
    if mesh.rank == mesh.ranks - 1:
        time.sleep(seconds)
    dist.barrier()
    return time.monotonic() - begin


def test_a_barrier_waits_for_all() -> None:
    assert min(run_ranks(barrier_with_one_late, 2, 0.5, timeout=60)) >= 0.45


@pytest.mark.long
def test_a_barrier_waits_longer_than_gloo_does() -> None:
    assert min(run_ranks(barrier_with_one_late, 2, 35.0, timeout=120)) >= 34


def test_a_question_whether_a_receive_is_complete_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    import paddle

    from paddle_dp.gloo import p2p

    inbox: list[bytes] = []
    endpoint = SimpleNamespace(
        arrived=lambda *source: bool(inbox), is_gone=lambda rank: False, receive=lambda *source: inbox.pop(0)
    )
    monkeypatch.setattr(p2p.transport, "endpoint", lambda: endpoint)
    tensors = [paddle.zeros([1]), paddle.zeros([1])]
    first, second = (p2p.ReceiveTask(SimpleNamespace(id=99, ranks=[0, 1]), 1, tensor) for tensor in tensors)
    assert not second.is_completed()
    inbox.append(np.float32(1).tobytes())
    assert not second.is_completed() and first.is_completed()
    inbox.append(np.float32(2).tobytes())
    assert second.is_completed() and [t.item() for t in tensors] == [1, 2]
