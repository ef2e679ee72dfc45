"""Every collective gives what NumPy says, in every type that gloo carries, for views as well, and on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_ranks

HERE = "tests/mesh/bridge/test_collectives.py"
TYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8")


def wrong(types: list[str]) -> list[str]:
    """The names of the collectives whose result on this rank is not NumPy's, in all `types`."""
    from paddle_dp.mesh import join
    from paddle_dp.mesh.bridge import install

    mesh = join()
    install(mesh)
    return [
        f"{name} {kind}"
        for kind in types
        for name, right in results(mesh.rank, mesh.ranks, kind)
        if not right
    ]


def results(rank: int, ranks: int, kind: str) -> Any:
    """(name, whether it is right) for one type. Values are small whole numbers, exact in each."""
    import numpy as np
    import paddle
    import paddle.distributed as dist

    def numbers(of: int) -> Any:
        return np.arange(4 * ranks * 3).reshape(4 * ranks, 3) % 3 + 1 + of % 2

    every = [numbers(of) for of in range(ranks)]

    def mine() -> Any:
        return paddle.to_tensor(numbers(rank)).astype(kind)

    def same(tensor: Any, expected: Any) -> bool:
        right_type = str(tensor.dtype).endswith(kind)
        return right_type and bool(
            np.array_equal(tensor.astype("float64").numpy(), np.asarray(expected, float))
        )

    def in_place(call: Any, expected: Any, tensor: Any = None) -> bool:
        tensor = mine() if tensor is None else tensor
        call(tensor)
        return same(tensor, expected)

    op = dist.ReduceOp
    yield "sum", in_place(dist.all_reduce, sum(every))
    yield "max", in_place(lambda t: dist.all_reduce(t, op.MAX), np.max(every, 0))
    yield "min", in_place(lambda t: dist.all_reduce(t, op.MIN), np.min(every, 0))
    yield "prod", in_place(lambda t: dist.all_reduce(t, op.PROD), np.prod(every, 0))
    yield "sum of a transposed view", in_place(dist.all_reduce, sum(every).T, mine().transpose([1, 0]))
    yield "sum of a scalar", in_place(dist.all_reduce, ranks, paddle.ones([], kind))
    if "float" in kind:
        yield "avg", in_place(lambda t: dist.all_reduce(t, op.AVG), sum(every) / ranks)
    yield "reduce", in_place(lambda t: dist.reduce(t, 1), sum(every) if rank == 1 else every[rank])
    yield "broadcast", in_place(lambda t: dist.broadcast(t, 1), every[1])
    out: list[Any] = []
    dist.all_gather(out, mine())
    yield "all_gather", all(same(a, b) for a, b in zip(out, every, strict=True))
    own = np.split(sum(every), ranks)[rank]
    part = paddle.zeros([4, 3], kind)
    yield (
        "reduce_scatter",
        in_place(lambda t: dist.reduce_scatter(t, list(paddle.split(mine(), ranks))), own, part),
    )
    part = paddle.zeros([4, 3], kind)
    yield "reduce_scatter tensor", in_place(lambda t: dist.stream.reduce_scatter(t, mine()), own, part)
    out = []
    dist.alltoall(out, [mine() + to for to in range(ranks)])
    yield "alltoall", all(same(a, b + rank) for a, b in zip(out, every, strict=True))
    whole = paddle.zeros([4 * ranks, 3], kind)
    swapped = np.concatenate([np.split(one, ranks)[rank] for one in every])
    yield "alltoall_single", in_place(lambda t: dist.alltoall_single(t, mine()), swapped, whole)
    part = paddle.zeros([4 * ranks, 3], kind)
    yield (
        "scatter",
        in_place(lambda t: dist.scatter(t, [mine() + to for to in range(ranks)], 0), every[0] + rank, part),
    )
    whole = paddle.zeros([4 * ranks * ranks, 3], kind)
    stream = dist.stream.all_gather(whole, mine(), sync_op=True, use_calc_stream=True)
    yield "all_gather on stream", (stream is None or stream.wait()) and same(whole, np.concatenate(every))
    yield (
        "broadcast on stream",
        in_place(lambda t: dist.stream.broadcast(t, 1, sync_op=True, use_calc_stream=True), every[1]),
    )


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_collectives_are_right(ranks: int) -> None:
    assert run_ranks(f"{HERE}:wrong", ranks, TYPES, timeout=150) == [[]] * ranks


def more() -> dict[str, Any]:
    """Uneven alltoall_single, objects, a refused type, a long sum in float16, asynchronous tasks."""
    import paddle
    import paddle.distributed as dist

    from paddle_dp.errors import UsageError
    from paddle_dp.mesh import join
    from paddle_dp.mesh.bridge import install

    mesh = join()
    install(mesh)
    found: dict[str, Any] = {}
    send = [[1, 2], [3, 1]][mesh.rank]  # rows for seat 0, for seat 1
    take = [[1, 3], [2, 1]][mesh.rank]
    given = paddle.arange(sum(send), dtype="float32").reshape([-1, 1]) + 10 * mesh.rank
    out = paddle.zeros([sum(take), 1])
    dist.alltoall_single(out, given, send, take)
    found["uneven"] = out.flatten().tolist()
    objects: list[Any] = []
    dist.all_gather_object(objects, {"rank": mesh.rank})
    found["objects"] = objects
    try:
        dist.all_reduce(paddle.ones([2], "int16"))
    except UsageError as error:
        found["int16"] = str(error)
    half = paddle.full([3], 30000.0, "float16")
    dist.all_reduce(half, dist.ReduceOp.AVG)  # the sum does not fit float16, the average does
    found["half"] = half.astype("float32").tolist()
    task = dist.all_reduce(found_tensor := paddle.ones([2]), sync_op=False)
    task.wait()
    found["task"] = found_tensor.tolist()
    return found


def test_the_rest() -> None:
    zero, one = run_ranks(f"{HERE}:more", 2, timeout=60)
    assert zero["uneven"] == [0, 10, 11, 12] and one["uneven"] == [1, 2, 13]
    for found in (zero, one):
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert "gloo cannot carry int16" in found["int16"]
        assert found["half"] == [30000.0] * 3 and found["task"] == [2.0, 2.0]
