"""Point-to-point on a process group: send, receive, their partial forms, and blocks in which nothing waits."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle

from paddle_dp.gloo import transport
from paddle_dp.gloo.originals import Done, around, group_of
from paddle_dp.gloo.patch import Patch

Source = tuple[int, int]  # a group's id, a global rank
_posted: collections.defaultdict[Source, collections.deque[Receipt]] = collections.defaultdict(
    collections.deque
)
_blocks: list[list[Receipt]] = []  # the receives of each open block


class Receipt(Done):
    """A receive that was posted; `wait` fills the tensor. Receives from one source are filled in the order posted."""

    def __init__(self, group: Any, rank: int, tensor: paddle.Tensor):
        """From the `rank`-th of `group`."""
        self.group, self.tensor, self.done = group, tensor, False
        self.source: Source = (group.id, group.ranks[rank])
        _posted[self.source].append(self)

    def wait(self, *_: Any) -> bool:
        while not self.done:
            _posted[self.source].popleft().fill()
        return True

    is_completed = synchronize = wait

    def fill(self) -> None:
        with around(self.group):
            data = transport.endpoint().take(*self.source)
        shape, kind = self.tensor.shape, paddle.empty([0], self.tensor.dtype).numpy().dtype
        if len(data) != kind.itemsize * math.prod(shape):
            raise ValueError(
                f"group {self.source[0]}: rank {self.source[1]} sent {len(data)} bytes, and the tensor that receives "
                f"them is {list(shape)} of {self.tensor.dtype}: the two ends do not agree on what comes next"
            )
        with paddle.no_grad():
            read = paddle.to_tensor(np.frombuffer(data, kind).reshape(shape))
            if read.dtype != self.tensor.dtype:  # NumPy knows no bfloat16: its bits travel as another type
                read = read.view(self.tensor.dtype)
            self.tensor.copy_(read, True)
        self.done = True


class PartialReceipt(Receipt):
    """A receive of one n-th; the whole tensor holds it n times until `all_gather_partial` puts the others in."""

    def __init__(self, group: Any, rank: int, whole: paddle.Tensor, parts: int):
        super().__init__(group, rank, paddle.empty([whole.size // parts], whole.dtype))
        self.whole, self.parts = whole, parts

    def fill(self) -> None:
        super().fill()
        with paddle.no_grad():
            self.whole.copy_(paddle.concat([self.tensor] * self.parts).reshape(self.whole.shape), True)


def send(process_group: Any, tensor: paddle.Tensor, rank: int, *_: Any) -> Done:
    """Queues a copy of `tensor` for a rank of the group and returns; the tensor may be changed at once."""
    group = group_of(process_group)
    data = np.ascontiguousarray(tensor.detach().contiguous().numpy())
    transport.endpoint().send(group.id, group.ranks[rank], data.reshape(-1).view(np.uint8).data)
    return Done()


def receive(process_group: Any, tensor: paddle.Tensor, rank: int, at_once: bool = True, *_: Any) -> Receipt:
    """Posts a receive from a rank of the group, and fills it at once unless asked not to, or inside a block."""
    return _post(Receipt(group_of(process_group), rank, tensor), at_once)


def send_part(process_group: Any, tensor: paddle.Tensor, rank: int, parts: int, index: int, *_: Any) -> Done:
    """Sends the `index`-th of `parts` equal parts of the flat tensor."""
    return send(process_group, part(tensor, parts, index), rank)


def receive_part(process_group: Any, tensor: paddle.Tensor, rank: int, parts: int, *rest: Any) -> Receipt:
    """Receives what `send_part` sent. `rest` is the part's index, and whether to wait."""
    at_once = rest[1] if len(rest) > 1 else True
    return _post(PartialReceipt(group_of(process_group), rank, tensor, parts), at_once)


def part(tensor: paddle.Tensor, parts: int, index: int) -> paddle.Tensor:
    """The `index`-th of `parts` equal parts of the flat tensor."""
    size = tensor.size // parts
    return tensor.detach().reshape([-1])[index * size : (index + 1) * size]


def _post(receipt: Receipt, at_once: bool) -> Receipt:
    if _blocks:
        _blocks[-1].append(receipt)
    elif at_once:
        receipt.wait()
    return receipt


def start_block(*_: Any) -> None:
    """Opens a block: until it ends nothing waits, so every rank's sends are out before any rank's receives."""
    _blocks.append([])


def end_block(*_: Any) -> None:
    """Ends the block; its receives are filled."""
    for receipt in _blocks.pop():
        receipt.wait()


@contextlib.contextmanager
def block(*_: Any) -> Iterator[None]:
    """A block as 2.6 writes it."""
    start_block()
    try:
        yield
    finally:
        end_block()


def patches() -> Iterator[Patch]:
    gloo = "paddle.base.core.ProcessGroupGloo"
    stuck = "gloo's send and receive block each other, and mistake messages in groups of three and more"
    for name, ours in (
        ("send", send),
        ("recv", receive),
        ("send_partial", send_part),
        ("recv_partial", receive_part),
    ):
        yield Patch(owner=gloo, name=name, value=ours, symptom=stuck)
        missing = "gloo has none: «does not support with sync_op flag»"
        yield Patch(owner=gloo, name=f"{name}_on_calc_stream", value=ours, symptom=missing, missing="add")
    nested = (
        "coalescing is NCCL's: on gloo the receives of a block wait one by one, and both sides wait for ever"
    )
    yield Patch(owner=gloo, name="_start_coalescing", value=start_block, symptom=nested, missing="add")
    yield Patch(owner=gloo, name="_end_coalescing", value=end_block, symptom=nested, missing="add")
    for module in ("communication.batch_isend_irecv", "fleet.meta_parallel.pp_utils.p2p_communication"):
        yield Patch(
            owner=f"paddle.distributed.{module}", name="_with_batch_p2p_guard", value=block,
            symptom="2.6 only: its block is NCCL's group call", missing="skip",
        )  # fmt: skip
