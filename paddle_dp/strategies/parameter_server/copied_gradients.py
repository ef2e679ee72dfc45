"""Copies a worker's gradients from its accelerator to the host during backward, and pushes them to servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import paddle

from paddle_dp.core.loss import Count
from paddle_dp.exchange.buckets import fill
from paddle_dp.exchange.grad_ready_hooks import GradReadyHooks
from paddle_dp.exchange.gradient_exchange import GradientExchange
from paddle_dp.exchange.host_copies import FlatCopy
from paddle_dp.exchange.push import Push
from paddle_dp.exchange.push_reduce import PushReduce
from paddle_dp.mesh.copies import ToHost
from paddle_dp.tensors import moved_gradient


class CopiedGradients(GradientExchange):
    """`PushedGradients` for a rank that only sends: the gradients of `parameters` go to the servers in `owners`, which
    add them up on their hosts.

    A bucket holds gradients of one server. It is copied once all of them are final (`GradReadyHooks`), on a separate
    stream, so that backward continues. It is sent when a later hook finds it on the host, at the latest after backward.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        parameters: Sequence[paddle.Tensor],
        owners: Sequence[int],
        senders: int,
    ):
        push, keepers = Push("gradients", ranks, rank), [[owner] for owner in owners]
        self._parameters = parameters
        self._reduce = PushReduce(push, parameters, keepers, senders=senders)
        self._fires = GradReadyHooks(parameters, self._ready)
        self._to_host = ToHost(parameters[0].place)
        counts = [int(parameter.size) for parameter in parameters]
        width = max(int(parameter.element_size()) for parameter in parameters)
        kinds = [(owner, parameter.dtype) for owner, parameter in zip(owners, parameters, strict=True)]
        buckets = fill(counts, kinds, width, len(set(owners)))
        self._bucket_of = {index: bucket.indices for bucket in buckets for index in bucket.indices}
        self._buckets = [bucket.indices for bucket in buckets]
        self._final: set[int] = set()  # indices
        self._copied: set[int] = set()
        self._copies: deque[tuple[FlatCopy, bool]] = deque()  # under way, and whether they are final

    @contextmanager
    def backward(self, last: bool, counted: Count = 0) -> Iterator[None]:
        """A context for a micro-batch's backward; during the `last` one of an update gradients are sent."""
        if not last:
            yield
            return
        with self._fires.enabled():
            yield

    @paddle.no_grad()
    def finish(self) -> list[int]:
        """Sends all remaining gradients after the last backward. Returns the indices without a local gradient."""
        self._fires.end()
        for bucket in self._buckets:
            self._copy(bucket, final=False)
        self._push(wait=True)
        without = [index for index in range(len(self._parameters)) if index not in self._copied]
        self._final, self._copied = set(), set()
        self._reduce.finish()
        return without

    @paddle.no_grad()
    def _ready(self, index: int, final: bool) -> None:
        if final:
            self._final.add(index)
            bucket = self._bucket_of[index]
            if self._final.issuperset(bucket):
                self._copy(bucket, final=True)
        self._push(wait=False)

    def _copy(self, indices: Iterable[int], final: bool) -> None:
        """Begins to copy the gradients of these parameters, and removes them from the parameters."""
        there = [index for index in indices if self._parameters[index].grad is not None]
        if there:
            self._copied.update(there)
            gradients = {index: moved_gradient(self._parameters[index]) for index in there}
            self._copies.append((FlatCopy(gradients, self._to_host), final))

    def _push(self, wait: bool) -> None:
        """Pushes the gradients that have arrived on the host; with `wait`, all of them."""
        while self._copies and (wait or self._copies[0][0].is_there):
            copy, final = self._copies.popleft()
            for index, data in copy.take().items():
                self._reduce.send_bytes(index, data, final)
