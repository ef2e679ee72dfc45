"""ZeRO-3 on CPUs: a rank requests a parameter from its owner; the owner's host threads reply while it computes."""

from __future__ import annotations

import struct
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import paddle

from paddle_dp.axes.sharding.prefetch_trace import FetchList, PrefetchTrace
from paddle_dp.core.data_group import Group
from paddle_dp.exchange.pushed_gradients import PushReduce
from paddle_dp.mesh import late_ranks, transport
from paddle_dp.mesh.messages import CHANNELS, Push
from paddle_dp.tensors import bytes_of

HEADER = struct.Struct("<qq")  # of a reply: the provider's number in its process, the parameter's index
Pass = tuple[int, int]  # the number of the provider in its process, and of the pass in the provider


class Pull:
    """Provides parameters on request, straight from the owner, and pushes gradients to it.

    (n - 1)/n of the parameters' bytes leave a rank in each pass over them, and as many bytes of gradients. Each rank
    requests in its local order, so none waits for another's layers. An owner's threads reply from the parameter's
    memory once the owner has begun the same pass, which follows its previous update. It cannot begin the next update
    before all ranks have ended the pass.
    """

    strict = False

    def __init__(
        self,
        group: Group,
        parameters: Sequence[paddle.Tensor],
        owners: Sequence[int],
        reduce_dtype: str | None = None,
    ):
        """`owners`: a global rank for each parameter. `reduce_dtype`: the dtype in which gradients travel."""
        self.id, self.ranks = CHANNELS["lent"], list(group.ranks)
        self.parameters, self._owners, self._me = parameters, owners, group.ranks[group.rank]
        self._reduce = PushReduce(
            Push("gradients", self.ranks, self._me),
            parameters,
            [[owner] for owner in owners],
            reduce_dtype=reduce_dtype,
        )
        self._expected: defaultdict[int, deque[int]] = defaultdict(deque)  # by owner: requested indices
        self._arrived: defaultdict[int, deque[bytearray]] = defaultdict(deque)  # by index
        self._begun = False
        for rank in self.ranks:
            if rank != self._me:
                transport.endpoint().connect(rank)
        self._number = answers.register(self)

    def begin(self, order: PrefetchTrace | None, need: FetchList) -> bool:
        self._begin()
        return order is not None

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            answers.begin_pass(self._number)

    def ask(self, indices: FetchList) -> None:
        by_owner: defaultdict[int, list[int]] = defaultdict(list)
        for index in indices:
            if self._owners[index] != self._me:
                by_owner[self._owners[index]].append(index)
        for owner, requested in by_owner.items():
            self._expected[owner].extend(requested)
            answers.ask(owner, requested)

    fetch = ask

    @paddle.no_grad()
    def take(self, index: int) -> paddle.Tensor:
        if not self._arrived[index]:
            self._wait(index)
        data, parameter = self._arrived[index].popleft(), self.parameters[index]
        values = paddle.empty(parameter.shape, parameter.dtype)
        bytes_of(values)[:] = np.frombuffer(data, np.uint8)
        return values

    def _wait(self, index: int) -> None:
        owner, endpoint = self._owners[index], transport.endpoint()
        # A separate group that the owner never enters: only the owner can be late in this wait.
        with late_ranks.waiting(f"from {owner}", (self._me, owner), f"the parameters of rank {owner}"):
            while not self._arrived[index]:
                number, came = HEADER.unpack(endpoint.receive(self.id, owner))
                data = endpoint.receive(self.id, owner)
                if number == self._number:  # else it is for a provider that was abandoned during a pass
                    assert came == self._expected[owner].popleft()
                    self._arrived[came].append(data)

    def gradient(self, index: int, follows: bool) -> None:
        self._reduce.send(index)
        self._reduce.take()

    def abandon(self, order: PrefetchTrace, requested: int, gradients: int, midway: bool) -> None:
        """Does nothing: no other rank knows this rank's order."""

    def finish(self) -> None:
        self._begin()  # others may need this rank's parameters although it needs none
        self._reduce.finish()
        self._begun = False

    def meet(self) -> None:
        """Does nothing: no rank waits for another's layers."""


class Answers:
    """Answers this process's parameter requests, for one provider at a time.

    A request for a pass that this process has not begun yet waits until it begins.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pass: Pass = (0, 0)
        self._lender: weakref.ReferenceType[Pull] | None = None
        self._waiting: list[tuple[int, Pass, list[int]]] = []

    def register(self, provider: Pull) -> int:
        """Answers for this provider from now on. Returns its number, the same on all ranks, which make their providers
        in the same order."""
        with self._lock:
            self._pass, self._lender = (self._pass[0] + 1, 0), weakref.ref(provider)
            number = self._pass[0]
        transport.endpoint().answer(CHANNELS["asked"], self._on_request)
        return number

    def begin_pass(self, number: int) -> None:
        """Begins a pass: the provider's parameters do not change until all ranks have ended it."""
        with self._lock:
            self._pass = number, self._pass[1] + 1
            due = [request for request in self._waiting if request[1] <= self._pass]
            self._waiting = [request for request in self._waiting if request[1] > self._pass]
            for rank, _, indices in due:
                self._send(rank, indices)

    def ask(self, owner: int, indices: Sequence[int]) -> None:
        """Requests parameters in this rank's current pass."""
        question = np.array([*self._pass, *indices], "<i8")
        transport.endpoint().ask(CHANNELS["asked"], owner, question.view(np.uint8).data)

    def _on_request(self, rank: int, data: bytearray) -> None:
        number, count, *indices = np.frombuffer(data, "<i8").tolist()
        with self._lock:
            if (number, count) > self._pass:
                self._waiting.append((rank, (number, count), indices))
            else:
                self._send(rank, indices)

    def _send(self, rank: int, indices: Sequence[int]) -> None:
        """Sends without a copy: no parameter changes until all ranks have ended the pass."""
        endpoint, provider = transport.endpoint(), self._lender() if self._lender else None
        if provider is None:
            return  # its training was abandoned
        for index in indices:
            endpoint.send(CHANNELS["lent"], rank, memoryview(HEADER.pack(self._pass[0], index)))
            endpoint.send(CHANNELS["lent"], rank, bytes_of(provider.parameters[index]).data)


answers = Answers()
