"""Every collective gives what NumPy says, in every type that gloo carries, for views as well, and on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.cases import joined
from tests.ranks import run_ranks

TYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint8")


def wrong(types: list[str]) -> list[str]:
    """The names of the collectives whose result on this rank is not NumPy's, in all `types`."""
    mesh = joined()
    all_numbers = [Numbers(mesh.rank, mesh.ranks, kind) for kind in types]
    received = (
        (name, numbers.kind, right)
        for numbers in all_numbers
        for one in (reductions, movements)
        for name, right in one(numbers)
    )
    return [f"{name} {kind}" for name, kind, right in received if not right]


class Numbers:
    """One rank's numbers in one type: small whole numbers, exact in each, other ones on odd ranks."""

    def __init__(self, rank: int, ranks: int, kind: str):
        import numpy as np

        self.rank, self.ranks, self.kind = rank, ranks, kind
        base = np.arange(4 * ranks * 3).reshape(4 * ranks, 3) % 3 + 1
        self.every = [base + of % 2 for of in range(ranks)]

    def mine(self) -> Any:
        import paddle

        return paddle.to_tensor(self.every[self.rank]).astype(self.kind)

    def zeros(self, rows: int) -> Any:
        import paddle

        return paddle.zeros([rows, 3], self.kind)

    def same(self, tensor: Any, expected: Any) -> bool:
        import numpy as np

        right_type = str(tensor.dtype).endswith(self.kind)
        return right_type and bool(
            np.array_equal(tensor.astype("float64").numpy(), np.asarray(expected, float))
        )

    def in_place(self, call: Any, expected: Any, tensor: Any = None) -> bool:
        tensor = self.mine() if tensor is None else tensor
        call(tensor)
        return self.same(tensor, expected)


def reductions(numbers: Numbers) -> Any:
    """(name, whether it is right)"""
    import numpy as np
    import paddle
    import paddle.distributed as dist

    op, every, right = dist.ReduceOp, numbers.every, numbers.in_place
    yield "sum", right(dist.all_reduce, sum(every))
    yield "max", right(lambda t: dist.all_reduce(t, op.MAX), np.max(every, 0))
    yield "min", right(lambda t: dist.all_reduce(t, op.MIN), np.min(every, 0))
    product = np.prod(every, 0)  # 144 of four ranks wraps in int8, as C's does
    wrapped = product.astype("int8") if numbers.kind == "int8" else product
    yield "prod", right(lambda t: dist.all_reduce(t, op.PROD), wrapped)
    yield "sum of a transposed view", right(dist.all_reduce, sum(every).T, numbers.mine().transpose([1, 0]))
    yield "sum of a scalar", right(dist.all_reduce, numbers.ranks, paddle.ones([], numbers.kind))
    if "float" in numbers.kind:
        yield "avg", right(lambda t: dist.all_reduce(t, op.AVG), sum(every) / numbers.ranks)
    yield (
        "reduce",
        right(lambda t: dist.reduce(t, 1), sum(every) if numbers.rank == 1 else every[numbers.rank]),
    )
    own = np.split(sum(every), numbers.ranks)[numbers.rank]
    pieces = list(paddle.split(numbers.mine(), numbers.ranks))
    yield "reduce_scatter", right(lambda t: dist.reduce_scatter(t, pieces), own, numbers.zeros(4))
    yield (
        "reduce_scatter tensor",
        right(lambda t: dist.stream.reduce_scatter(t, numbers.mine()), own, numbers.zeros(4)),
    )


def movements(numbers: Numbers) -> Any:
    """(name, whether it is right)"""
    import numpy as np
    import paddle.distributed as dist

    every, rank, ranks, right = numbers.every, numbers.rank, numbers.ranks, numbers.in_place
    yield "broadcast", right(lambda t: dist.broadcast(t, 1), every[1])
    out: list[Any] = []
    dist.all_gather(out, numbers.mine())
    yield "all_gather", all(numbers.same(a, b) for a, b in zip(out, every, strict=True))
    for_each = [numbers.mine() + to for to in range(ranks)]
    out = []
    dist.alltoall(out, for_each)
    yield "alltoall", all(numbers.same(a, b + rank) for a, b in zip(out, every, strict=True))
    swapped = np.concatenate([np.split(one, ranks)[rank] for one in every])
    yield (
        "alltoall_single",
        right(lambda t: dist.alltoall_single(t, numbers.mine()), swapped, numbers.zeros(4 * ranks)),
    )
    yield "scatter", right(lambda t: dist.scatter(t, for_each, 0), every[0] + rank, numbers.zeros(4 * ranks))
    turned = numbers.mine().transpose([1, 0])
    yield "broadcast of a view", right(lambda t: dist.broadcast(t, 1), every[1].T, turned)
    dist.all_gather(out := [], numbers.mine().transpose([1, 0]))
    yield "all_gather of views", all(numbers.same(a, b.T) for a, b in zip(out, every, strict=True))
    views = [one.transpose([1, 0]) for one in for_each]
    target = numbers.zeros(4 * ranks).transpose([1, 0])
    yield "scatter of views", right(lambda t: dist.scatter(t, views, 0), (every[0] + rank).T, target)
    stream = {"sync_op": True, "use_calc_stream": True}
    whole = numbers.zeros(4 * ranks * ranks)
    dist.stream.all_gather(whole, numbers.mine(), **stream)
    yield "all_gather on stream", numbers.same(whole, np.concatenate(every))
    yield "broadcast on stream", right(lambda t: dist.stream.broadcast(t, 1, **stream), every[1])
    yield "sum on stream", right(lambda t: dist.stream.all_reduce(t, **stream), sum(every))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_collectives_are_right(ranks: int) -> None:
    assert run_ranks(wrong, ranks, TYPES, timeout=150) == [[]] * ranks


def more() -> dict[str, Any]:
    """Uneven alltoall_single, objects, a refused type, a long sum in float16, asynchronous tasks."""
    import paddle
    import paddle.distributed as dist

    from paddle_dp.errors import UsageError

    mesh = joined()
    found: dict[str, Any] = {}
    send = [[1, 2], [3, 1]][mesh.rank]  # rows for rank 0, for rank 1
    take = [[1, 3], [2, 1]][mesh.rank]
    given = paddle.arange(sum(send), dtype="float32").reshape([-1, 1]) + 10 * mesh.rank
    out = paddle.zeros([sum(take), 1])
    dist.alltoall_single(out, given, send, take)
    found["uneven"] = out.flatten().tolist()
    objects: list[Any] = []
    dist.all_gather_object(objects, {"rank": mesh.rank})
    found["objects"] = objects
    found["refused"] = []
    for kind in ("int16", "complex64"):
        odd = paddle.ones([2], "int16").astype(kind)
        for call in (
            lambda: dist.all_reduce(odd),  # noqa: B023 - called at once
            lambda: dist.broadcast(odd, 0),  # noqa: B023
            lambda: dist.all_gather([], odd),  # noqa: B023
            lambda: dist.scatter(odd, [odd, odd], 0),  # noqa: B023
            lambda: dist.gather(odd, [], 0),  # noqa: B023
        ):
            try:
                call()
            except UsageError as error:
                found["refused"].append(f"gloo cannot carry {kind}" in str(error))
    found["raw"] = raw(mesh)
    half = paddle.full([3], 30000.0, "float16")
    dist.all_reduce(half, dist.ReduceOp.AVG)  # the sum does not fit float16, the average does
    found["half"] = half.astype("float32").tolist()
    task = dist.all_reduce(found_tensor := paddle.ones([2]), sync_op=False)
    task.wait()
    found["task"] = found_tensor.tolist()
    return found


def raw(mesh: Any) -> list[float]:
    """A process group that was made by hand, without a Group around it: a sum, a message, a barrier."""
    import paddle
    from paddle.base import core

    store = core.create_or_get_global_tcp_store()
    group = core.ProcessGroupGloo.create(store, 1 - mesh.rank, mesh.ranks)  # group ranks in reverse order
    tensor = paddle.full([1], 1.0 + mesh.rank)
    if mesh.rank:
        group.send(tensor, 1, True)  # which is rank 0
    else:
        group.recv(tensor, 0, True)
    received = tensor.tolist()
    group.broadcast(tensor, 0, True).wait()
    group.barrier()
    summed = paddle.full([1], 10.0 * (mesh.rank + 1))
    group.all_reduce(summed, core.ReduceOp.SUM, True).wait()
    return [*received, *tensor.tolist(), *summed.tolist()]


def test_the_rest() -> None:
    zero, one = run_ranks(more, 2, timeout=60)
    assert zero["uneven"] == [0, 10, 11, 12] and one["uneven"] == [1, 2, 13]
    for found in (zero, one):
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert found["refused"] == [True] * 10
        assert found["raw"] == [2.0, 2.0, 30.0]
        assert found["half"] == [30000.0] * 3 and found["task"] == [2.0, 2.0]


def sent_to_others() -> dict[str, float]:
    """Bytes that this rank sends to others, as a share of those that it gives."""
    import paddle
    import paddle.distributed as dist

    from paddle_dp.mesh import transport

    mesh = joined()
    endpoint, given = transport.endpoint(), paddle.ones([mesh.ranks * 1000])
    sizes: list[int] = []
    plain = endpoint.send
    endpoint.send = lambda group, rank, data: (sizes.append(len(data)), plain(group, rank, data))
    found = {}
    for name, exchange in (
        ("reduce_scatter", lambda: dist.stream.reduce_scatter(paddle.zeros([1000]), given)),
        ("alltoall_single", lambda: dist.alltoall_single(paddle.zeros_like(given), given)),
    ):
        exchange()
        found[name] = sum(sizes) / (4 * given.size)
        sizes.clear()
    return found


def test_a_rank_sends_nothing_to_itself_and_no_more_than_the_others_shares() -> None:
    for found in run_ranks(sent_to_others, 2):
        assert found == {"reduce_scatter": 0.5, "alltoall_single": 0.5}
