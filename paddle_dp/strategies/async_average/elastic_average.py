"""Elastic averaging: asynchronous ranks and a center that attract each other."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence

import numpy as np

from paddle_dp.mesh import transport
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.tensors import Array

ROUND = struct.Struct("<q")


class ElasticAverage:
    """The center x̃ of the ranks' weights x, split among the global `ranks`: each keeps one slice.

    A rank sends x and receives α (x - x̃), which it subtracts from its then current weights; x̃ has already gained it
    (EASGD, asynchronous: Zhang, Choromanska and LeCun 2015, arXiv:1412.6651, algorithm 1). A keeper's socket threads
    reply, also while it computes: a slow rank is not a slow keeper. `rate` is α.
    """

    def __init__(self, ranks: Sequence[int], rank: int, size: int, rate: float):
        self.ranks, self.rank, self.rate = list(ranks), rank, rate
        self.peers = [other for other in self.ranks if other != rank]
        bounds = [size * index // len(self.ranks) for index in range(len(self.ranks) + 1)]
        self._slices = {r: slice(*bounds[index : index + 2]) for index, r in enumerate(self.ranks)}
        self._lock = threading.Lock()
        self._round = 0
        self._center: Array = np.empty(0)
        self._early: list[tuple[int, int, bytearray]] = []  # rank, round and message
        self._pulled: Array | None = None  # from the local slice, in the current exchange
        if self.peers:
            transport.endpoint().answer(CHANNELS["elastic"], self._on_request)

    def begin(self, weights: Array) -> None:
        """Begins a round by setting the center to `weights` [size]. Every rank calls it with the same weights."""
        with self._lock:
            self._round += 1
            self._center = weights[self._slices[self.rank]].copy()
            due, self._early = self._early, []
            for rank, _, data in due:
                self._answer(rank, data)

    @property
    def is_under_way(self) -> bool:
        return self._pulled is not None

    def send(self, weights: Array) -> None:
        """Begins an exchange of this rank's weights [size], which must not change until `take`."""
        for other in self.peers:
            piece = weights[self._slices[other]]
            header = memoryview(ROUND.pack(self._round))
            transport.endpoint().send(CHANNELS["elastic"], other, header, piece.view(np.uint8).data)
        with self._lock:
            self._pulled = self._pull(weights[self._slices[self.rank]])

    def has_arrived(self) -> bool:
        """Whether `take` would return at once."""
        return all(transport.endpoint().arrived(CHANNELS["center"], other) for other in self.peers)

    def take(self) -> Array:
        """Waits for α (x - x̃) [size] of the current exchange. Raises LostPeerError if a keeper is gone."""
        pulled = self._pulled
        assert pulled is not None, "an exchange was begun"
        weights = {self.rank: pulled}
        for other in self.peers:
            data = transport.endpoint().receive(CHANNELS["center"], other)
            weights[other] = np.frombuffer(data, pulled.dtype)
        self._pulled = None
        return np.concatenate([weights[rank] for rank in self.ranks])

    def _pull(self, weights: Array) -> Array:
        difference = (weights - self._center) * weights.dtype.type(self.rate)
        self._center += difference
        return difference

    def _on_request(self, rank: int, data: bytearray) -> None:
        (number,) = ROUND.unpack_from(data)
        with self._lock:
            if number > self._round:  # this rank has not begun that round yet
                self._early.append((rank, number, data))
            else:
                self._answer(rank, data)

    def _answer(self, rank: int, data: bytearray) -> None:
        weights = np.frombuffer(memoryview(data)[ROUND.size :], self._center.dtype)
        answer = self._pull(weights)
        transport.endpoint().send(CHANNELS["center"], rank, answer.view(np.uint8).data)
