"""Rank 0 reads each global batch and sends every rank its slice (`dataset.reading: scatter`).

A rank receives bitwise the samples that it would have read itself. Rank 0 reads and sends `prefetch` batches ahead, so
that sending, and reading in worker processes, overlap with the computation. Each rank acknowledges the batches that it
has taken; rank 0 waits for a rank that lags.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_dp.batch import leaves, mapped, structure_of, unflatten
from paddle_dp.data.arrays import Array, Arrays, rows_of
from paddle_dp.data.sample import BatchShare, BatchSource, MicroArrays, class_names
from paddle_dp.data.sampler import Indices, Sampler, is_ordered
from paddle_dp.data.stream import Stream
from paddle_dp.errors import DataError, UsageError
from paddle_dp.mesh import Mesh, transport

Delivered = Callable[[Indices], None]
"""A callback that gets the indices of the samples this rank has received, batch by batch, dummies included."""

_LENGTH = struct.Struct("<Q")
_RECEIPT = struct.Struct("<qq")  # number of the read, batch
_ALIGNED = 64
_CHANNELS = itertools.count(-1000, -1)  # all ranks create scattered data sets in the same order


@dataclass(frozen=True)
class Elsewhere:
    """Stands for a data set that only rank 0 can read; `stream`: its order is fixed."""

    samples: int
    classes: tuple[str, ...] = ()
    stream: bool = False

    @classmethod
    def for_rank(cls, dataset: Any, mesh: Mesh) -> Any:
        """Returns `dataset` on rank 0 and its stand-in on other ranks; None if rank 0 has None. Collective. Raises
        UsageError, on every rank, for a data set in an order that only rank 0 would know."""
        facts: list[Any] | None = None
        if dataset is not None:
            classes = list(map(str, class_names(dataset)))
            facts = [len(dataset), classes, isinstance(dataset, Stream), is_ordered(dataset)]
        main_facts = mesh.gather(facts)[0]
        if main_facts is not None and main_facts[3]:
            raise UsageError(
                "dataset.reading: scatter reads in the sampler's order, and this data set states its epochs' order "
                "(epoch_order), as a mixture does: leave dataset.reading out."
            )
        if mesh.is_main or main_facts is None:
            return dataset if mesh.is_main else None
        return cls(main_facts[0], tuple(main_facts[1]), main_facts[2])

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        raise DataError("only rank 0 reads the data (dataset.reading: scatter)")


@dataclass(frozen=True)
class ReadByMain:
    """A data set that rank 0 of `mesh` reads for all ranks; on the others `dataset` is `Elsewhere`."""

    dataset: Any
    mesh: Mesh
    delivered: Delivered | None = None

    def __len__(self) -> int:
        return len(self.dataset)


def is_in_order(dataset: Any) -> bool:
    """True if a data set's samples can be read only in its order."""
    return isinstance(dataset, Stream) or (isinstance(dataset, Elsewhere) and dataset.stream)


class Scatterer(BatchSource):
    """Rank 0's source: reads whole global batches with `source`, keeps rank 0's slices and sends the others."""

    def __init__(self, source: BatchSource, sampler: Sampler, shared: ReadByMain, prefetch: int):
        self._source, self._prefetch, self._delivered, mesh = source, prefetch, shared.delivered, shared.mesh
        self._global_sampler = global_sampler = replace(sampler, dp_rank=0, dp_size=1)
        self._dp_ranks = [mesh.axes.dp_rank(rank) for rank in range(mesh.ranks)]
        self._samplers = {
            dp_rank: replace(global_sampler, dp_rank=dp_rank, dp_size=mesh.dp_size)
            for dp_rank in self._dp_ranks
        }
        self._channel, self._reads = next(_CHANNELS), 0
        self._peers = range(1, mesh.ranks)
        self._received: dict[int, int] = {}  # rank → the last batch of this read that it has taken

    def read(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[list[MicroArrays]]:
        """Yields rank 0's micro-batches. A reading error is raised when its batch is due, not when it is prefetched."""
        self._reads, self._received = self._reads + 1, {}

        def wholes() -> Iterator[BatchShare]:
            for k, _ in shares:
                self._received = self._received or dict.fromkeys(self._peers, k - 1)
                yield k, self._global_sampler

        source = self._source.read_with_shares(epoch, wholes())
        ready = deque[tuple[int, list[MicroArrays]]]()
        error: Exception | None = None
        ended = False
        while True:
            while not (ended or error) and len(ready) <= self._prefetch:
                try:
                    if ended := (read := next(source, None)) is None:
                        break
                    (k, _), arrays = read
                    ready.append((k, self._scattered(arrays, epoch, k)))
                except Exception as raised:  # noqa: BLE001 - a data set may raise anything; raised when due
                    error = raised
            if not ready:
                if error is not None:
                    raise error
                return
            k, micro_batches = ready.popleft()
            if self._delivered is not None:
                self._delivered(_indices(self._samplers[self._dp_ranks[0]], epoch, k))
            yield micro_batches

    def _scattered(self, micro_batches: list[MicroArrays], epoch: int, k: int) -> list[MicroArrays]:
        """Sends all ranks their slices of global batch `k`, and returns this rank's."""
        packed: dict[int, list[memoryview]] = {}
        size = self._global_sampler.size(k, epoch)
        for rank, dp_rank in enumerate(self._dp_ranks[1:], start=1):
            if dp_rank not in packed:
                slices, key = self._slices(micro_batches, dp_rank, size), (self._reads, epoch, k)
                packed[dp_rank] = pack(slices, key, _indices(self._samplers[dp_rank], epoch, k))
            self._wait_for(rank, k)
            transport.endpoint().send(self._channel, rank, *packed[dp_rank])
        # The source reuses its arrays for the next batch, so they are copied.
        chunk = self._slices(micro_batches, self._dp_ranks[0], size)
        return [(mapped(np.array, inputs), mapped(np.array, targets), n) for inputs, targets, n in chunk]

    def _slices(self, micro_batches: list[MicroArrays], dp_rank: int, size: int) -> list[MicroArrays]:
        """A data rank's part of each micro-batch of a global batch of `size` samples, as its `Sampler.reads`: an empty
        part becomes a dummy."""
        slices: list[MicroArrays] = []
        cuts = zip(self._global_sampler.cuts(size), self._samplers[dp_rank].cuts(size), strict=True)
        for (inputs, targets, _), ((first, _), (start, stop)) in zip(micro_batches, cuts, strict=True):
            rows = slice(start - first, max(stop, start + 1) - first)
            slices.append((rows_of(inputs, rows), rows_of(targets, rows), stop - start))
        return slices

    def _wait_for(self, rank: int, k: int) -> None:
        """Waits until a rank lags at most 2 × `prefetch` + 2 batches."""
        endpoint, lag = transport.endpoint(), 2 * self._prefetch + 2
        while endpoint.arrived(self._channel, rank) or self._received[rank] < k - lag:
            read, number = _RECEIPT.unpack(endpoint.receive(self._channel, rank))
            if read == self._reads:
                self._received[rank] = number

    def workers_busy(self) -> float:
        return self._source.workers_busy()

    def close(self) -> None:
        self._source.close()


class Received(BatchSource):
    """The other ranks' source: receives batches from rank 0. Raises DataError for another batch than is due."""

    def __init__(self, sampler: Sampler, delivered: Delivered | None = None):
        self._sampler, self._channel, self._reads, self._delivered = sampler, next(_CHANNELS), 0, delivered

    def read(self, epoch: int, shares: Iterator[BatchShare]) -> Iterator[list[MicroArrays]]:
        self._reads += 1
        endpoint = transport.endpoint()
        for k, _ in shares:
            key, micro_batches, indices = unpack(endpoint.receive(self._channel, 0))
            while key[0] < self._reads:  # left from a read that was abandoned
                key, micro_batches, indices = unpack(endpoint.receive(self._channel, 0))
            expected = _indices(self._sampler, epoch, k)
            if key != (self._reads, epoch, k) or not np.array_equal(indices, expected):
                raise DataError(
                    f"rank 0 has sent batch {key[2]} of epoch {key[1]}, samples {indices[:4].tolist()} …, and batch "
                    f"{k} of epoch {epoch}, samples {expected[:4].tolist()} …, is due"
                )
            endpoint.send(self._channel, 0, memoryview(_RECEIPT.pack(self._reads, k)))
            if self._delivered is not None:
                self._delivered(indices)
            yield micro_batches


def _indices(sampler: Sampler, epoch: int, k: int) -> Indices:
    """The samples of a global batch that a rank receives, in the order of its micro-batches."""
    return np.concatenate([indices for indices, _ in sampler.reads(epoch, k)])


def pack(micro_batches: list[MicroArrays], key: tuple[int, int, int], indices: Array) -> list[memoryview]:
    """Packs a message: `key` and the arrays' forms as JSON, then copies of the arrays."""
    buffers = [np.ascontiguousarray(indices, np.int64)]
    forms = []
    for inputs, targets, count in micro_batches:
        forms.append([count, structure_of((inputs, targets)), len(leaves((inputs, targets)))])
        buffers += [np.array(leaf) for leaf in leaves((inputs, targets))]
    arrays = [[buffer.dtype.name, list(buffer.shape)] for buffer in buffers]
    head = json.dumps({"key": key, "forms": forms, "arrays": arrays}).encode()
    head += b" " * (-(_LENGTH.size + len(head)) % _ALIGNED)
    message = [memoryview(_LENGTH.pack(len(head)) + head)]
    for buffer in buffers:
        if buffer.nbytes:
            data: Any = buffer.reshape(-1).view(np.uint8)
            message += [memoryview(data), memoryview(bytes(-buffer.nbytes % _ALIGNED))]
    return [piece for piece in message if len(piece)]


def unpack(message: bytearray) -> tuple[tuple[int, int, int], list[MicroArrays], Array]:
    """The key, the micro-batches and the samples' indices of a message; the arrays are views of it."""
    (length,) = _LENGTH.unpack_from(message)
    at = _LENGTH.size + length
    head = json.loads(bytes(message[_LENGTH.size : at]))
    arrays: list[Array] = []
    for name, shape in head["arrays"]:
        arrays.append(np.ndarray(shape, np.dtype(name), message, at))
        at += arrays[-1].nbytes + -arrays[-1].nbytes % _ALIGNED
    rest = iter(arrays)
    indices = next(rest)
    micro_batches: list[MicroArrays] = []
    for samples, structure, size in head["forms"]:
        inputs, targets = unflatten(structure, list(itertools.islice(rest, size)))
        micro_batches.append((inputs, targets, samples))
    return tuple(head["key"]), micro_batches, indices


def share(mesh: Mesh, sample: Arrays | None) -> Arrays:
    """Sends rank 0's arrays to every rank and returns them. Collective."""
    channel = next(_CHANNELS)
    if mesh.is_main:
        message = pack([(sample, (), 0)], (0, 0, 0), np.zeros(0, np.int64))
        for rank in range(1, mesh.ranks):
            transport.endpoint().send(channel, rank, *message)
        return sample
    return unpack(transport.endpoint().receive(channel, 0))[1][0][0]
