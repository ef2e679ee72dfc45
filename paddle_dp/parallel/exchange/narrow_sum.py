"""Sums of flat tensors in 16 bits on the wire, added in 32, with the memory of what that loses: on accelerators."""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist

from paddle_dp.parallel.exchange.memory import LARGEST_HALF
from paddle_dp.parallel.hcg import Group


class NarrowSum:
    """A flat tensor on its way: each rank's is rounded to `dtype`, and each rank adds up a part, in the order of ranks.

    A collective that adds in 16 bits would round at each turn, and nobody would know what was lost. So all ranks send
    each other the parts that they add up, and then the rounded sums, for as many bytes as a ring. The first half begins
    when this is made; the second is in `wait`, after which `flat` is the sum, and `lost` this rank's errors, in the
    same shape: those of its own numbers, and in its part those of the sum. `clipped`, bool on the device: some were too
    large for float16; None: of another dtype. Collective.
    """

    def __init__(self, flat: paddle.Tensor, dtype: str, group: Group):
        self._flat, self._dtype, self._group = flat, dtype, group
        self.clipped: paddle.Tensor | None = None
        self.size = -(-int(flat.size) // group.nranks)  # of a part
        padded = paddle.concat([flat, paddle.zeros([self.size * group.nranks - int(flat.size)], flat.dtype)])
        self._sent = self._rounded(padded)
        self.lost = padded - self._sent.astype(flat.dtype)
        self._rows = paddle.empty([self.size * group.nranks], self._sent.dtype)
        self._task: Any = dist.alltoall_single(self._rows, self._sent, group=group, sync_op=False)

    @paddle.no_grad()
    def wait(self) -> None:
        """The device does, not the host."""
        self._task.wait()
        total = paddle.zeros([self.size], self._flat.dtype)
        for rank in range(self._group.nranks):
            total += self._rows[rank * self.size : (rank + 1) * self.size].astype(total.dtype)
        rounded = self._rounded(total)
        start = self._group.rank * self.size
        self.lost._slice(start, start + self.size).add_(total - rounded.astype(total.dtype))
        parts: list[paddle.Tensor] = []
        dist.all_gather(parts, rounded, group=self._group)
        whole = paddle.concat(parts)[: int(self._flat.size)]
        self._flat.copy_(whole.astype(self._flat.dtype), False)
        self.lost = self.lost[: int(self._flat.size)]

    def _rounded(self, numbers: paddle.Tensor) -> paddle.Tensor:
        """What float16 has no number for becomes its largest one: the rest is remembered. NaN and infinities stay."""
        if self._dtype == "float16":
            held, finite = numbers.clip(-LARGEST_HALF, LARGEST_HALF), paddle.isfinite(numbers)
            clipped = finite.logical_and(held != numbers).any()
            self.clipped = clipped if self.clipped is None else self.clipped.logical_or(clipped)
            numbers = paddle.where(finite, held, numbers)
        return numbers.astype(self._dtype)
