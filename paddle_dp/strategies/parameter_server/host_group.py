"""Exchanges tensors of all workers' layers and losses through server 0: workers are not connected to one another.

Examples are the statistics of a BatchNorm over the global batch, and the samples that a loss compares. The server's
process answers in the threads that read its sockets, independently of its updates, and need not know a model's layers.
"""

from __future__ import annotations

import threading
from collections import deque

import paddle

from paddle_dp.core.gathered_samples import GatheredSamples
from paddle_dp.mesh import Mesh, transport
from paddle_dp.mesh.mesh import copied_bytes, tensors_of
from paddle_dp.mesh.messages import CHANNELS, Messages

HUB = 0  # the rank of server 0


class HostGroup:
    """The workers of a mesh, as the ranks over which a layer gathers and sums (`data_group.ProcessGroup`)."""

    def __init__(self, mesh: Mesh):
        workers = range(mesh.axes.servers, mesh.ranks)
        self._messages = Messages([HUB, *workers], mesh.rank, "sums", hub=HUB) if mesh.reads else None
        if mesh.rank == HUB:
            passed_on.serve(list(workers))

    def gather_tensor(self, tensor: paddle.Tensor) -> list[paddle.Tensor]:
        """Every worker's `tensor` (equal shapes and dtypes), in rank order. Collective over the workers."""
        assert self._messages is not None, "a server has no forward"
        rows = self._messages.gather(copied_bytes(tensor), "an exchange between the workers")
        return tensors_of(rows[1:], tensor)

    def sum_tensor(self, tensor: paddle.Tensor) -> paddle.Tensor:
        """Sums `tensor` over the workers, in place, and returns it. Collective over the workers."""
        first, *following = self.gather_tensor(tensor)
        tensor.set_value(sum(following, first))
        return tensor


class SamplesOfWorkers(GatheredSamples):
    """The samples of one micro-batch on all workers, for a loss that compares them."""

    def __init__(self, mesh: Mesh):
        # A server has no samples and no loss.
        super().__init__(range(mesh.ranks), mesh.rank, HostGroup(mesh))
        self.index = mesh.dp_rank

    def _sizes(self, count: int) -> list[int]:
        return [int(size.item()) for size in self.among.gather_tensor(paddle.to_tensor([count], "int64"))]


class PassedOn:
    """In server 0: receives one message of each worker, and sends all of them to each, in rank order, repeatedly."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, deque[bytearray]] = {}

    def serve(self, workers: list[int]) -> None:
        with self._lock:
            self._waiting = {rank: deque() for rank in workers}
        transport.endpoint().answer(CHANNELS["sums"], self._take)

    def _take(self, rank: int, data: bytearray) -> None:
        with self._lock:
            self._waiting[rank].append(data)
            if all(self._waiting.values()):
                rows = [b"", *(bytes(waiting.popleft()) for waiting in self._waiting.values())]
                packed = Messages.packed(rows)
                for worker in self._waiting:
                    transport.endpoint().send(CHANNELS["sums"], worker, packed)


passed_on = PassedOn()
