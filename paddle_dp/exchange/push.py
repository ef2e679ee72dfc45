"""Numbered tensors pushed from rank to rank over the hosts' sockets: a send never waits, a receive does.

On CPUs new parameter values travel this way, too: from each owner to all other ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import paddle

from paddle_dp.core.data_group import Group
from paddle_dp.mesh import late_ranks, transport
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.tensors import Array, bytes_of


class ParamBroadcast:
    """Sends `parameters` from their `owners` (global ranks of the group) to all ranks.

    (n - 1)/n of all bytes leave each rank.
    """

    def __init__(self, group: Group, parameters: Sequence[paddle.Tensor], owners: Sequence[int]):
        self._parameters, self._owners = parameters, owners
        self._push = Push("values", group.ranks, group.ranks[group.rank])

    @paddle.no_grad()
    def share(self) -> None:
        """Sends the parameters that this rank owns to all others and receives theirs. Collective."""
        pairs = list(zip(self._parameters, self._owners, strict=True))
        for index, (parameter, owner) in enumerate(pairs):
            if owner == self._push.rank:
                self._push.send_all(index, parameter)
        with self._push.waiting("the exchange of updated parameters"):
            for parameter, owner in pairs:
                if owner != self._push.rank:
                    received = self._push.receive(owner)
                    assert received is not None
                    self._push.into(parameter, received[1])


NUMBER = struct.Struct("<q")
END = -1  # in place of a number: the sender has ended this round


class Push:
    """Numbered tensors on the CPU, exchanged among the global `ranks`; `rank` is this one.

    Tensors from one rank to another on one `channel` (of `mesh.messages.CHANNELS`) arrive in order. A push leaves at
    once, also during a backward, and travels while the rank computes. gloo's collectives make all ranks wait for each
    other, also the asynchronous ones (3.3.1).
    """

    def __init__(self, channel: str, ranks: Sequence[int], rank: int):
        self.id, self.ranks, self.rank = CHANNELS[channel], list(ranks), rank
        self.peers = [other for other in self.ranks if other != rank]
        self._channel = channel

    def send_all(self, number: int, tensor: paddle.Tensor) -> None:
        """Sends a copy to all others, now or in a thread: the tensor may be changed immediately."""
        data = bytes_of(tensor if tensor.is_contiguous() else tensor.contiguous()).copy()
        for to in self.peers:
            self.send_bytes(to, number, data)

    def send_bytes(self, to: int, number: int, data: Array) -> None:
        """Sends bytes, which must not change before the other rank has them."""
        transport.endpoint().send(self.id, to, memoryview(NUMBER.pack(number)), data.data)

    def end(self, to: int) -> None:
        """Marks the end of this round for a rank."""
        transport.endpoint().send(self.id, to, memoryview(NUMBER.pack(END)))

    def receive(self, source: int) -> tuple[int, memoryview] | None:
        """The next tensor from a rank: its number and its bytes, which the caller may keep; None at the end of a round.

        Raises LostPeerError if the rank is gone or sends nothing for `Patience.seconds`.
        """
        data = transport.endpoint().receive(self.id, source)
        (number,) = NUMBER.unpack_from(data)
        return None if number == END else (number, memoryview(data)[NUMBER.size :])

    def arrived(self, source: int) -> bool:
        """Whether `receive` would return at once."""
        return transport.endpoint().arrived(self.id, source)

    @staticmethod
    def into(tensor: paddle.Tensor, data: memoryview) -> None:
        """Writes received bytes into a tensor of the same shape and dtype."""
        bytes_of(tensor)[:] = np.frombuffer(data, np.uint8)

    @contextmanager
    def waiting(self, activity: str) -> Iterator[None]:
        """Wraps receives that all ranks reach together: makes the wait visible to observers and names late ranks."""
        with transport.around(self), late_ranks.waiting(self._channel, self.ranks, activity):
            yield
