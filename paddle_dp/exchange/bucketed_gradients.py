"""Exchange of gradients on accelerators, during backward and of the rest after it: flat buckets, reduced on a separate
stream.

A bucket may travel in 16 bits: it is summed in 32 bits, and the rounding error is added to the next sum.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_dp.core.data_group import CommGroups, Group
from paddle_dp.core.loss import Count
from paddle_dp.core.precision import NOTHING
from paddle_dp.exchange.buckets import LARGEST, Bucket, BucketSizes, called, fill
from paddle_dp.exchange.gradient_exchange import UNFINISHED, GradientExchange, GradReadyHooks
from paddle_dp.exchange.residuals import Residuals
from paddle_dp.exchange.roundings import roundings
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import Messages
from paddle_dp.mesh.transport import traffic
from paddle_dp.tensors import LARGEST_HALF, as_dtype, dtype_of, nbytes, wide


class NarrowSum:
    """A sum in flight: each rank rounds its flat tensor to `dtype` and adds up one slice, in the order of ranks.

    A 16-bit collective would round at every addition, with an unknown error. So each rank sends every other rank the
    slice that it adds up, and then all exchange the rounded sums: as many bytes as a ring. The constructor starts the
    first half; `wait` does the second. Afterwards `flat` is the sum and `lost` this rank's error, of the same shape:
    the error of its numbers and, in its slice, of the sum. `clipped` (bool on the device) is true if a number was too
    large for float16; None for other dtypes. Collective.
    """

    def __init__(self, flat: paddle.Tensor, dtype: str, group: Group):
        self._flat, self._dtype, self._group = flat, dtype, group
        self.clipped: paddle.Tensor | None = None
        self.size = -(-int(flat.size) // group.nranks)  # of a slice
        padded = paddle.concat([flat, paddle.zeros([self.size * group.nranks - int(flat.size)], flat.dtype)])
        self._sent = self._rounded(padded)
        self.lost = padded - self._sent.astype(flat.dtype)
        self._rows = paddle.empty([self.size * group.nranks], self._sent.dtype)
        self._task: Any = dist.alltoall_single(self._rows, self._sent, group=group, sync_op=False)

    @paddle.no_grad()
    def wait(self) -> None:
        """Makes the device wait, not the host."""
        self._task.wait()
        total = paddle.zeros([self.size], self._flat.dtype)
        for rank in range(self._group.nranks):
            total += self._rows[rank * self.size : (rank + 1) * self.size].astype(total.dtype)
        rounded = self._rounded(total)
        start = self._group.rank * self.size
        self.lost._slice(start, start + self.size).add_(total - rounded.astype(total.dtype))
        chunks: list[paddle.Tensor] = []
        dist.all_gather(chunks, rounded, group=self._group)
        summed = paddle.concat(chunks)[: int(self._flat.size)]
        self._flat.copy_(summed.astype(self._flat.dtype), False)
        self.lost = self.lost[: int(self._flat.size)]

    def _rounded(self, numbers: paddle.Tensor) -> paddle.Tensor:
        """Rounds; clips to float16's largest number, and `lost` keeps the difference. NaN and infinities stay."""
        if self._dtype == "float16":
            clipped_numbers, finite = numbers.clip(-LARGEST_HALF, LARGEST_HALF), paddle.isfinite(numbers)
            clipped = finite.logical_and(clipped_numbers != numbers).any()
            self.clipped = clipped if self.clipped is None else self.clipped.logical_or(clipped)
            numbers = paddle.where(finite, clipped_numbers, numbers)
        return numbers.astype(self._dtype)


# Limits of the bytes in flight where each micro-batch is exchanged: a fraction of all gradients, and bytes per group.
# This memory reduces the saving of stage 2.
WAITING, MOST_WAITING = 4, 2 * LARGEST


class BucketedGradients(GradientExchange):
    """Sums gradients over the ranks of `group`, then over `replicas`, ranks that own the same parameters.

    Without `owners` all ranks get the sums; `owners` names one global rank per parameter that gets its sum.

    A bucket holds gradients of one owner and leaves when all are final (`GradReadyHooks`), in the same order on all
    ranks. A missing gradient is zeros; an incomplete bucket leaves after backward. A reduce to the owner moves each
    byte once; a reduce-scatter of whole parameters would need padding to twice their size. `comm_groups` are groups of
    the same ranks in which buckets of different owners travel concurrently.

    `deferred`: indices of gradients that a layer produces just before it exchanges activations. A bucket completed by
    one of them leaves after that exchange, for which compute waits, and travels while the next layers compute.
    `each_micro_batch`: every backward exchanges gradients, so that only the owner keeps them (ZeRO-2). `sizes`: bucket
    sizes, derived from the parameters if None. `overlapped=False`: nothing leaves before backward has ended.
    `reduce_dtype`: the dtype in which gradients travel and the collective adds. With `residuals` they are summed in 32
    bits instead, and their errors are kept there (`NarrowSum`).

    It works on CPUs over gloo, too; a bucket that leaves then blocks until it is reduced (3.3.1).
    """

    def __init__(  # noqa: PLR0913 - groups, parameters, and the layout's options
        self,
        group: Group,
        parameters: Sequence[paddle.Tensor],
        *,
        owners: Sequence[int] | None = None,
        replicas: Group | None = None,
        each_micro_batch: bool = False,
        comm_groups: CommGroups | None = None,
        deferred: Collection[int] = (),
        sizes: BucketSizes | None = None,
        overlapped: bool = True,
        reduce_dtype: str | None = None,
        residuals: Residuals | None = None,
        waiting: Callable[[bool], AbstractContextManager[Any]] | None = None,
    ):
        self._waiting = waiting or (lambda computes: NOTHING)
        self._comm_groups = comm_groups or CommGroups([group])
        self.each_micro_batch = each_micro_batch
        self._group, self._replicas, self._me = group, replicas, group.ranks[group.rank]
        self._parameters, self._owners = parameters, owners
        self._overlapped, self._reduce_dtype, self._residuals = overlapped, reduce_dtype, residuals
        self._dtypes = [self._dtype_in_bucket(parameter) for parameter in parameters]
        kinds = [
            (owners[index] if owners is not None else -1, dtype) for index, dtype in enumerate(self._dtypes)
        ]
        width = max((int(parameter.element_size()) for parameter in parameters), default=4)
        counts = [int(parameter.size) for parameter in parameters]
        self._buckets = fill(counts, kinds, width, len(set(owners)) if owners is not None else 1, sizes)
        self._deferred = frozenset(deferred)
        self._may_travel = min(width * sum(counts) // WAITING, MOST_WAITING * len(self._comm_groups.groups))
        self._bucket_of = {
            index: number for number, bucket in enumerate(self._buckets) for index in bucket.indices
        }
        self._messages = Messages(group.ranks, self._me, "gradients")
        self._replies = Messages(replicas.ranks, self._me, "replicas") if replicas is not None else None
        self._ready_hooks = GradReadyHooks(parameters if overlapped else [], self.ready)
        self._had: set[int] = set()  # indices with a local gradient in this update
        self._sums: dict[int, paddle.Tensor] = {}  # by index: of buckets that this rank keeps
        self._travelling: deque[tuple[Bucket, paddle.Tensor, Any]] = deque()
        self._begin()

    def _begin(self) -> None:
        self._flat: dict[int, paddle.Tensor] = {}  # by number: buckets that have not left
        self._final: set[int] = set()
        self._next = 0  # the bucket that leaves next

    @contextmanager
    def backward(self, last: bool, counted: Count = 0) -> Iterator[None]:
        """Wraps a micro-batch's backward, `last` of an update: buckets leave while it runs."""
        if not (last or self.each_micro_batch) or not self._overlapped:
            with self._waiting(True) if last else NOTHING:
                yield
            return
        with self._waiting(True), self._ready_hooks.enabled():
            yield
        if self.each_micro_batch:
            self._end_round()

    def finish(self) -> list[int]:
        """Called after an update's last backward: the ranks that keep a gradient get its sum, where any rank has one.
        Returns the indices of parameters without a local gradient. Collective."""
        with self._waiting(False):
            return self._finished()

    def _finished(self) -> list[int]:
        if not self.each_micro_batch:
            self._end_round()
        self._settle(0)
        had = [index in self._had for index in range(len(self._parameters))]
        late = [parameter.grad is not None for parameter in self._parameters]
        anywhere = self._agree(self._messages, [*had, *late])
        self._exchange_late([index for index, is_late in enumerate(anywhere[len(had) :]) if is_late])
        if self._replies is not None:
            anywhere = self._agree(self._replies, anywhere)
            self._add_replicas()
        for index, total in self._sums.items():
            parameter = self._parameters[index]
            if anywhere[index]:
                parameter._copy_gradient_from(as_dtype(total, dtype_of(parameter)))  # the same memory
            elif self._residuals is not None:
                self._residuals.take_back(index)
        self._had, self._sums = set(), {}
        UNFINISHED.discard(id(self))
        return [index for index, has_gradient in enumerate(had) if not has_gradient]

    @staticmethod
    def _agree(messages: Messages, flags: Sequence[bool]) -> list[bool]:
        """Returns which flags any rank has set. The hosts exchange them, so that no device is waited for."""
        bits = np.packbits(np.array(flags, bool)).tobytes()
        rows = [np.frombuffer(row, np.uint8) for row in messages.gather(bits, "the exchange of gradients")]
        return [bool(flag) for flag in np.unpackbits(np.bitwise_or.reduce(rows), count=len(flags))]

    def ready(self, index: int, final: bool) -> None:
        """Takes a gradient during `backward`. If not `final`, more contributions may follow, so it is sent afterwards.
        ZeRO-2, which must not keep it, sends it now, and later contributions late."""
        if (final or self.each_micro_batch) and index not in self._final:
            self._final.add(index)
            self._fill(index)
            if index not in self._deferred:
                self._leave()

    @paddle.no_grad()
    def _fill(self, index: int) -> None:
        """Moves a gradient into its bucket; zeros if there is none."""
        UNFINISHED.add(id(self))
        parameter = self._parameters[index]
        if parameter.grad is not None:
            self._had.add(index)
            # The gradient is rounded once, and then each sum except the first.
            if self._reduce_dtype is not None and self._residuals is None:
                roundings.note(parameter, parameter.grad, self._reduce_dtype, len(self._group.ranks))
            self._view(index).copy_(as_dtype(parameter.grad, self._dtypes[index]), False)
            parameter.clear_gradient(False)
        else:
            self._view(index).zero_()
        if self._residuals is not None and (error := self._residuals.get(index)) is not None:
            self._view(index).add_(error)

    def _dtype_in_bucket(self, parameter: paddle.Tensor) -> str:
        """The dtype in which a gradient is summed. With residuals it is wide: they hold errors of the gradient
        itself."""
        if self._residuals is not None:
            return wide(parameter)
        return self._reduce_dtype or dtype_of(parameter)

    def _view(self, index: int) -> paddle.Tensor:
        number = self._bucket_of[index]
        bucket = self._buckets[number]
        if number not in self._flat:
            self._flat[number] = paddle.empty([bucket.size], self._dtypes[index])
        return _slice_of(self._flat[number], bucket, index, self._parameters[index].shape)

    @paddle.no_grad()
    def _leave(self) -> None:
        """Sends the complete buckets in order: none overtakes another."""
        while self._next < len(self._buckets) and self._final.issuperset(self._buckets[self._next].indices):
            number = self._next
            bucket, flat = self._buckets[number], self._flat.pop(number)
            self._next += 1
            owner, began = bucket.kind[0], time.monotonic()  # type: ignore[index]
            task: Any
            if self._residuals is not None:
                task = NarrowSum(flat, str(self._reduce_dtype), self._group)
            elif self._owners is None:
                task = dist.all_reduce(flat, group=self._group, sync_op=False)
            else:
                task = dist.reduce(flat, owner, group=self._comm_groups.group_of(owner), sync_op=False)
            self._count(flat)
            if heartbeat.tape is not None:
                heartbeat.tape.hand_over(called(number, nbytes(flat)), began)
            self._travelling.append((bucket, flat, task))
            if self.each_micro_batch:
                self._settle(self._may_travel)

    def _count(self, flat: paddle.Tensor) -> None:
        """Adds a bucket's traffic to this process's byte counts."""
        size = (
            nbytes(flat) if self._residuals is None else 2 * int(flat.size)
        )  # a NarrowSum travels in 16 bits
        count = traffic.all_reduced if self._owners is None else traffic.reduced
        count(size, len(self._group.ranks))

    def _end_round(self) -> None:
        """Sends the remaining gradients after a round's last backward."""
        self._ready_hooks.end()
        for index in range(len(self._parameters)):
            if index not in self._final:
                self._final.add(index)
                self._fill(index)
        self._leave()
        self._begin()

    @paddle.no_grad()
    def _settle(self, most: int) -> None:
        """Waits for the oldest buckets until at most `most` bytes are in flight. The device waits, not the host."""
        travelling = sum(nbytes(flat) for _, flat, _ in self._travelling)
        while travelling > most:
            bucket, flat, task = self._travelling.popleft()
            travelling -= nbytes(flat)
            task.wait()
            if isinstance(task, NarrowSum):
                self._remember(bucket, task)
            if self._owners is not None and self._me != bucket.kind[0]:  # type: ignore[index]
                continue
            for index in bucket.indices:
                view = _slice_of(flat, bucket, index, self._parameters[index].shape)
                # Sums over micro-batches stay wide.
                if self._reduce_dtype is not None and self.each_micro_batch:
                    view = as_dtype(view, wide(self._parameters[index]))
                self._sums[index] = self._sums[index].add_(view) if index in self._sums else view

    def _remember(self, bucket: Bucket, task: NarrowSum) -> None:
        assert self._residuals is not None
        if task.clipped is not None:
            self._residuals.may_be_clipped(bucket.indices, task.clipped)
        for index in bucket.indices:
            self._residuals.lose(index, _slice_of(task.lost, bucket, index, self._parameters[index].shape))

    @paddle.no_grad()
    def _exchange_late(self, indices: Sequence[int]) -> None:
        """Sums contributions made after their bucket left: a rank used the parameter more often than before."""
        for index in indices:
            parameter = self._parameters[index]
            late = (
                paddle.zeros(parameter.shape, parameter.dtype) if parameter.grad is None else parameter.grad
            )
            dist.all_reduce(late, group=self._group)
            if index in self._sums:
                self._sums[index] = self._sums[index] + as_dtype(late, dtype_of(self._sums[index]))
            parameter.clear_gradient(False)

    @paddle.no_grad()
    def _add_replicas(self) -> None:
        """Sums the gradients that this rank keeps over `replicas`."""
        order = sorted(self._sums)
        assert self._replicas is not None
        if self._reduce_dtype is not None:
            for index, total in self._sums.items():
                roundings.note(self._parameters[index], total, self._reduce_dtype, len(self._replicas.ranks))
            self._sums = {index: as_dtype(total, self._reduce_dtype) for index, total in self._sums.items()}
        for total in self._sums.values():
            traffic.all_reduced(nbytes(total), len(self._replicas.ranks))
        tasks = [dist.all_reduce(self._sums[index], group=self._replicas, sync_op=False) for index in order]
        for task in tasks:
            task.wait()


def _slice_of(flat: paddle.Tensor, bucket: Bucket, index: int, shape: Sequence[int]) -> paddle.Tensor:
    """A view of one gradient in a bucket."""
    start = bucket.starts[bucket.indices.index(index)]
    size = int(np.prod(shape, dtype=np.int64))
    view = flat._slice(start, start + size)
    view.get_tensor()._set_dims(list(shape))
    return view
