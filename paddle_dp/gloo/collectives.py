"""Collectives that ProcessGroupGloo lacks or gets wrong; its correct ones are also added as `…_on_calc_stream`.

All work in place on the given tensors, like the library's, and return a completed task.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import paddle
from paddle.base import core

from paddle_dp.gloo import p2p
from paddle_dp.gloo.originals import SAVED, CompletedTask, check_dtype, original
from paddle_dp.gloo.patch import GLOO, Patch
from paddle_dp.tensors import dtype_of

Tensors = Sequence[paddle.Tensor]


def fill(target: paddle.Tensor, source: paddle.Tensor) -> CompletedTask:
    """Copies `source` into `target`'s memory, keeping `target`'s shape and dtype."""
    with paddle.no_grad():
        if target is not source:
            target.copy_(source.reshape(target.shape).astype(target.dtype), True)
    return CompletedTask()


def gathered(process_group: Any, tensor: paddle.Tensor) -> list[paddle.Tensor]:
    """Returns every rank's tensor, in the order of the group. Collective."""
    flat = check_dtype(tensor).detach().contiguous().reshape([-1])
    out = paddle.empty([process_group.size() * flat.size], flat.dtype)
    original("all_gather_into_tensor")(process_group, out, flat, True).wait()
    return [row.reshape(tensor.shape) for row in paddle.split(out, process_group.size())]


def all_reduce(process_group: Any, tensor: paddle.Tensor, op: Any = None, *_: Any) -> CompletedTask:
    """Reduces `tensor` in place. Averages and float16 are summed in float32; a strided tensor is reduced as a copy."""
    ops = core.ReduceOp
    op = ops.SUM if op is None else op
    mean = op == ops.AVG
    wide = tensor.dtype == paddle.float16 or (mean and tensor.dtype != paddle.float64)
    work = check_dtype(tensor).detach()
    if wide:
        work = work.astype("float32")
    elif mean or not work.is_contiguous():
        work = work.clone().contiguous()
    original("all_reduce")(process_group, work, ops.SUM if mean else op, True).wait()
    if not mean and work.data_ptr() == tensor.data_ptr():
        return CompletedTask()
    return fill(tensor, work / process_group.size() if mean else work)


def reduced(process_group: Any, tensor: paddle.Tensor, op: Any = None) -> paddle.Tensor:
    """Returns the reduction of `tensor` over the group as a new tensor, outside any graph. Collective."""
    work = tensor.detach().clone()
    all_reduce(process_group, work, op)
    return work


def reduce(process_group: Any, tensor: paddle.Tensor, rank: int, op: Any = None, *_: Any) -> CompletedTask:
    """Reduces to one rank of the group and leaves the other ranks' tensors unchanged."""
    total = reduced(process_group, tensor, op)
    return fill(tensor, total) if process_group.rank() == rank else CompletedTask()


def reduce_scatter(
    process_group: Any, out: paddle.Tensor, source: Any, op: Any = None, *_: Any
) -> CompletedTask:
    """Reduces, and leaves each rank its share; `source` is one tensor, or a list with one for each rank.

    Each share is sent directly to its rank, which adds shares in rank order: half the bytes of an all-reduce.
    """
    ranks, local_rank = process_group.size(), process_group.rank()
    shares = list(source) if isinstance(source, list | tuple) else paddle.split(source.detach(), ranks)
    for rank, share in enumerate(shares):
        if rank != local_rank:
            p2p.send(process_group, share, rank)
    local = shares[local_rank].detach()
    everyone = [
        local if rank == local_rank else p2p.received(process_group, paddle.empty_like(local), rank)
        for rank in range(ranks)
    ]
    return fill(out, _combined(everyone, op))


# Types in which narrow types are added: Paddle's CPU package cannot add or compare most of them.
_WIDE = {"float16": "float32", "bfloat16": "float32", "int8": "int32", "uint8": "int32", "bool": "int32"}


def _combined(tensors: Tensors, op: Any) -> paddle.Tensor:
    """Reduces the ranks' tensors in rank order, narrow types in a wider type."""
    ops, dtype = core.ReduceOp, dtype_of(tensors[0])
    if dtype in _WIDE:
        tensors = [tensor.astype(_WIDE[dtype]) for tensor in tensors]
    ways = {ops.MAX: paddle.maximum, ops.MIN: paddle.minimum, ops.PRODUCT: paddle.multiply}
    total = functools.reduce(ways.get(op, paddle.add), tensors)
    return total / len(tensors) if op == ops.AVG else total


def all_to_all(process_group: Any, outs: Tensors, ins: Tensors, *_: Any) -> CompletedTask:
    """Sends the j-th input to rank j and receives the j-th output from it."""
    local_rank = process_group.rank()
    for rank, tensor in enumerate(ins):
        if rank != local_rank:
            p2p.send(process_group, tensor, rank)
    fill(outs[local_rank], ins[local_rank])
    for rank, tensor in enumerate(outs):
        if rank != local_rank:
            p2p.received(process_group, tensor, rank)
    return CompletedTask()


def all_to_all_single(
    process_group: Any,
    out: paddle.Tensor,
    source: paddle.Tensor,
    out_sizes: Sequence[int] | None = None,
    in_sizes: Sequence[int] | None = None,
    *_: Any,
) -> CompletedTask:
    """Exchanges parts of one tensor along dim 0, with the given sizes or equal ones, like `all_to_all`."""

    def split(tensor: paddle.Tensor, sizes: Sequence[int] | None) -> list[paddle.Tensor]:
        return list(paddle.split(tensor, [int(size) for size in sizes] if sizes else process_group.size()))

    chunks = [paddle.empty_like(chunk) for chunk in split(out, out_sizes)]
    all_to_all(process_group, chunks, split(source, in_sizes))
    return fill(out, paddle.concat(chunks))


def all_gather_partial(
    process_group: Any, out: paddle.Tensor, source: paddle.Tensor, chunk_count: int, index: int, *_: Any
) -> CompletedTask:
    """Concatenates every rank's chunk of a partially received tensor."""
    return fill(out, paddle.concat(gathered(process_group, p2p.chunk_of(source, chunk_count, index))))


def barrier(process_group: Any, *_: Any) -> CompletedTask:
    """Returns when every rank has called it, within `Patience.seconds`: gloo's barrier gives up after a fixed 30 s."""
    token, peers = paddle.zeros([1]), range(1, process_group.size())
    if process_group.rank():
        p2p.send(process_group, token, 0)
        p2p.receive(process_group, token, 0)
        return CompletedTask()
    for rank in peers:
        p2p.receive(process_group, token, rank)
    for rank in peers:
        p2p.send(process_group, token, rank)
    return CompletedTask()


def _for_strided(name: str, *flags: bool) -> Callable[..., Any]:
    """Wraps the library's collective, which refuses strided tensors, to run on contiguous copies of them.

    The wrapper raises UsageError for a dtype that would end the process. `flags` follow the caller's arguments: the
    `_on_calc_stream` form has no `sync_op`. (Without one, all_gather and scatter take their input before their output.)
    """
    collective = original(name)

    @functools.wraps(collective)
    def on_copies(process_group: Any, *args: Any) -> Any:
        copies: list[tuple[paddle.Tensor, paddle.Tensor]] = []

        def contiguous(argument: Any) -> Any:
            if isinstance(argument, list | tuple):
                return [contiguous(item) for item in argument]
            if not isinstance(argument, paddle.Tensor):
                return argument
            check_dtype(argument)
            if argument.is_contiguous():
                return argument
            copies.append((argument, argument.detach().contiguous()))
            return copies[-1][1]

        task = collective(process_group, *map(contiguous, args), *flags)
        for argument, copy in copies:  # copies include outputs
            fill(argument, copy)
        return task

    return on_copies


def patches() -> Iterator[Patch]:
    absent = 'NotImplementedError: "ProcessGroupGLOO does not support … with sync_op flag"'
    refused = "refuses strided tensors; exit(-1) without a message for int16 and complex"
    rows: tuple[tuple[str, Callable[..., Any], Callable[..., Any], str], ...] = (
        ("all_reduce", all_reduce, all_reduce, "float16 sums come out as inf, AVG is missing"),
        ("reduce", reduce, reduce, "leaves partial sums in the other ranks' tensors"),
        ("reduce_scatter", reduce_scatter, reduce_scatter, absent),
        ("reduce_scatter_tensor", reduce_scatter, reduce_scatter, absent),
        ("all_to_all", all_to_all, all_to_all, absent),
        ("all_to_all_tensor", all_to_all_single, all_to_all_single, absent),
        ("all_to_all_single", all_to_all_single, all_to_all_single, absent),
        ("all_gather_partial", all_gather_partial, all_gather_partial, absent),
        *((name, _for_strided(name), _for_strided(name, True), refused) for name in SAVED[2:]),
    )
    for name, replacement, on_stream, symptom in rows:
        yield Patch(GLOO, name, replacement, symptom)
        yield Patch(GLOO, f"{name}_on_calc_stream", on_stream, absent, missing="add")
    yield Patch(GLOO, "barrier", barrier, "gives up after a fixed 30 s")
