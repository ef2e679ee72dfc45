"""Point-to-point on a process group: send, receive, their partial forms, and blocks that defer receives.

gloo's send and recv block each other, and number messages by a counter that differs between ranks in groups of three
and more; these use `mesh/transport.py`.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle

from paddle_dp.gloo.originals import CompletedTask, group_of
from paddle_dp.gloo.patch import GLOO, Patch
from paddle_dp.mesh import transport

Source = tuple[int, int]  # group id, global rank
_posted: collections.defaultdict[Source, collections.deque[ReceiveTask]] = collections.defaultdict(
    collections.deque
)
_blocks: list[list[ReceiveTask]] = []  # the receives of each open block


class ReceiveTask(CompletedTask):
    """A posted receive; `wait` fills the tensor. Receives from one source are filled in the order posted."""

    def __init__(self, group: Any, rank: int, tensor: paddle.Tensor):
        """Posts a receive from the `rank`-th rank of `group`."""
        self.tensor, self.done = tensor, False
        self.source: Source = (group.id, group.ranks[rank])
        _posted[self.source].append(self)

    def wait(self, *_: Any) -> bool:
        while not self.done:
            _posted[self.source].popleft().fill()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Returns whether the tensor is filled. Does not wait; raises LostPeerError if the peer is gone."""
        endpoint = transport.endpoint()
        while not self.done and (endpoint.arrived(*self.source) or endpoint.is_gone(self.source[1])):
            _posted[self.source].popleft().fill()
        return self.done

    def fill(self) -> None:
        data = transport.endpoint().receive(*self.source)
        shape, dtype = self.tensor.shape, paddle.empty([0], self.tensor.dtype).numpy().dtype
        if len(data) != dtype.itemsize * math.prod(shape):
            raise ValueError(
                f"group {self.source[0]}: rank {self.source[1]} sent {len(data)} bytes, but the receiving tensor is "
                f"{list(shape)} of {self.tensor.dtype}: sends and receives of the two ranks do not match. Compare the "
                "order, shapes and dtypes of their calls."
            )
        with paddle.no_grad():
            received = paddle.to_tensor(np.frombuffer(data, dtype).reshape(shape))
            if received.dtype != self.tensor.dtype:  # NumPy lacks bfloat16: its bits are sent as uint16
                received = received.view(self.tensor.dtype)
            self.tensor.copy_(received, True)
        self.done = True


class PartialReceiveTask(ReceiveTask):
    """A receive of one of n chunks; the full tensor holds it n times until `all_gather_partial` adds the others."""

    def __init__(self, group: Any, rank: int, full: paddle.Tensor, chunk_count: int):
        super().__init__(group, rank, paddle.empty([full.size // chunk_count], full.dtype))
        self.full, self.chunk_count = full, chunk_count

    def fill(self) -> None:
        super().fill()
        with paddle.no_grad():
            self.full.copy_(paddle.concat([self.tensor] * self.chunk_count).reshape(self.full.shape), True)


def send(process_group: Any, tensor: paddle.Tensor, rank: int, *_: Any) -> CompletedTask:
    """Queues a copy of `tensor` for a rank of the group and returns; the tensor may be changed immediately."""
    group = group_of(process_group)
    data = np.ascontiguousarray(tensor.detach().contiguous().numpy())
    transport.endpoint().send(group.id, group.ranks[rank], data.reshape(-1).view(np.uint8).data)
    return CompletedTask()


def receive(
    process_group: Any, tensor: paddle.Tensor, rank: int, sync_op: bool = True, *_: Any
) -> ReceiveTask:
    """Posts a receive from a rank of the group; waits for it with `sync_op` outside a block."""
    return _post(ReceiveTask(group_of(process_group), rank, tensor), sync_op)


def received(process_group: Any, tensor: paddle.Tensor, rank: int) -> paddle.Tensor:
    """Fills `tensor` with a message from a rank of the group and returns it; waits for it, also within a block."""
    ReceiveTask(group_of(process_group), rank, tensor).wait()
    return tensor


def send_partial(
    process_group: Any, tensor: paddle.Tensor, rank: int, chunk_count: int, index: int, *_: Any
) -> CompletedTask:
    """Sends the `index`-th of `chunk_count` equal chunks of the flat tensor."""
    return send(process_group, chunk_of(tensor, chunk_count, index), rank)


def receive_partial(
    process_group: Any,
    tensor: paddle.Tensor,
    rank: int,
    chunk_count: int,
    index: int,
    sync_op: bool = True,
    *_: Any,
) -> ReceiveTask:
    """Receives a chunk from `send_partial`; `all_gather_partial` decides its position in the tensor (`index`)."""
    return _post(PartialReceiveTask(group_of(process_group), rank, tensor, chunk_count), sync_op)


def chunk_of(tensor: paddle.Tensor, chunk_count: int, index: int) -> paddle.Tensor:
    """Returns the `index`-th of `chunk_count` equal chunks of the flat tensor."""
    size = tensor.size // chunk_count
    return tensor.detach().reshape([-1])[index * size : (index + 1) * size]


def _post(task: ReceiveTask, sync_op: bool) -> ReceiveTask:
    if _blocks:
        _blocks[-1].append(task)
    elif sync_op:
        task.wait()
    return task


def start_block(*_: Any) -> None:
    """Opens a block: its receives wait at its end, after all its sends, so that no two ranks block each other."""
    _blocks.append([])


def end_block(*_: Any) -> None:
    """Ends the block and waits for its receives."""
    for task in _blocks.pop():
        task.wait()


def patches() -> Iterator[Patch]:
    deadlock = "gloo's send and receive block each other, and mix up messages in groups of three and more"
    absent = 'gloo has none: "does not support with sync_op flag"'
    named = {"send": send, "recv": receive, "send_partial": send_partial, "recv_partial": receive_partial}
    for name, replacement in named.items():
        yield Patch(GLOO, name, replacement, deadlock)
        yield Patch(GLOO, f"{name}_on_calc_stream", replacement, absent, missing="add")
    absent = "gloo has no coalescing: the receives of a block wait one by one, and both sides wait for ever"
    yield Patch(GLOO, "_start_coalescing", start_block, absent, missing="add")
    yield Patch(GLOO, "_end_coalescing", end_block, absent, missing="add")
