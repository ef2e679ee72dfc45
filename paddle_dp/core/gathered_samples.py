"""The samples of all data ranks, for a loss that compares them: gathered with exact gradients, from unequal shares."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import paddle
from paddle.autograd import PyLayer

from paddle_dp.core.data_group import ProcessGroup
from paddle_dp.mesh.messages import Messages

_ROWS = struct.Struct("<q")


class _Gather(PyLayer):
    """All ranks' rows. Each rank's loss uses all of them, so backward gives each rank the sum over the ranks of its
    rows' gradients."""

    @staticmethod
    def forward(ctx: Any, rows: paddle.Tensor, samples: GatheredSamples, sizes: list[int]) -> paddle.Tensor:
        ctx.samples, ctx.sizes, ctx.rows = samples, sizes, rows.shape[0]
        return samples.all_rows(rows, sizes)

    @staticmethod
    def backward(ctx: Any, grad: paddle.Tensor) -> paddle.Tensor:
        total = ctx.samples.among.sum_tensor(grad.clone())
        me, sizes = ctx.samples.index, ctx.sizes
        first = sum(sizes[:me])
        if sizes[me] == 0:  # the row of a dummy, which was not gathered
            return paddle.zeros([ctx.rows, *grad.shape[1:]], grad.dtype)
        return total[first : first + sizes[me]]


class GatheredSamples:
    """The samples of one micro-batch on the data `ranks`, of which `rank` is one, in the order of `ranks`.

    `among` exchanges their tensors. The hosts exchange the numbers of rows, so that no device is waited for.
    """

    def __init__(self, ranks: Sequence[int], rank: int, among: ProcessGroup):
        self.among, self.index = among, list(ranks).index(rank)
        self._messages = Messages(ranks, rank, "samples")
        self._present, self._alone = True, False

    def gather(self, *rows: paddle.Tensor) -> tuple[list[paddle.Tensor], int]:
        """Gathers `rows` [n, …] of all ranks to [N, …]; also returns the index at which this rank's begin (N for a
        dummy).

        If all ranks have dummies, returns this rank's rows. Collective, and so is backward: every rank's loss must use
        the gathered rows, or backward deadlocks.
        """
        if self._alone:
            return list(rows), 0
        sizes = self._sizes(rows[0].shape[0] if self._present else 0)
        # A short batch left this micro-batch empty: each rank has a dummy, which does not count.
        if not any(sizes):
            return list(rows), 0
        gathered = [_Gather.apply(x, self, sizes) if _learned(x) else self.all_rows(x, sizes) for x in rows]
        return gathered, sum(sizes[: self.index]) if self._present else sum(sizes)

    @contextmanager
    def present(self, present: bool) -> Iterator[None]:
        """Wraps the loss of a micro-batch: if not `present`, this rank has only a dummy sample."""
        before, self._present = self._present, present
        try:
            yield
        finally:
            self._present = before

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wraps losses of this rank's samples only. Nothing is gathered."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def _sizes(self, count: int) -> list[int]:
        rows = self._messages.gather(_ROWS.pack(count), "a loss over the samples of all ranks")
        return [int(_ROWS.unpack(row)[0]) for row in rows]

    @paddle.no_grad()
    def all_rows(self, rows: paddle.Tensor, sizes: Sequence[int]) -> paddle.Tensor:
        """All ranks' rows, `sizes[i]` from rank i. Collective."""
        most, local_size = max(sizes), sizes[self.index]
        padding = paddle.zeros([most - local_size, *rows.shape[1:]], rows.dtype)
        padded = paddle.concat([rows, padding]) if 0 < local_size < most else rows if local_size else padding
        gathered = self.among.gather_tensor(padded.contiguous())
        return paddle.concat([chunk[:size] for chunk, size in zip(gathered, sizes, strict=True) if size])


def _learned(rows: paddle.Tensor) -> bool:
    return not rows.stop_gradient and paddle.is_grad_enabled()
