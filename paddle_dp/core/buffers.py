"""Keeps a model's buffers, except BatchNorm's statistics, equal on all ranks by broadcasting the first rank's values.

A buffer that forward updates from its samples (a moving centre, a codebook's counts, a queue) diverges between ranks.
Most cannot be averaged, and a sync at checkpoints would make the training depend on their times. So the first rank's
values are broadcast after each update, as with torch's `broadcast_buffers`: all ranks compute with the values that are
saved, evaluated and resumed. One process would update buffers from all samples: `sync` and `differences` report it. A
buffer with another shape on some rank (a cache of indices, one for each sample) stays as it is.

A buffer that depends on the weights alone (spectral norm's vectors, weight norm's product) is equal on all ranks
without any exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_dp.core.consistency import digests
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.tensors import dtype_of
from paddle_dp.text import CAN_DIFFER, and_more

Named = list[tuple[str, paddle.Tensor]]
_REMEDY = (
    "one process updates from all samples (state of single samples, carried from batch to batch, belongs in a plain "
    "Python list, which stays each rank's: docs/same.md#other-buffers)"
)
_USUAL = {"float32", "float64", "int8", "uint8", "int32", "int64"}  # dtypes that every backend can broadcast


class Buffers:
    """Broadcasts the buffers of a model that differ between ranks.

    `named` returns this rank's current buffers by their names in the whole model (forward may replace a buffer's
    tensor). `groups` are groups of ranks that hold the same buffers, None for all ranks. The source is the first rank
    of each that reads samples; a rank that reads none, a server, only receives.
    """

    def __init__(self, named: Callable[[], Named], mesh: Mesh, groups: Sequence[Any] = (None,)):
        self._named, self._mesh, self._groups = named, mesh, groups
        self._updates = 0
        self._diverging: list[str] = []
        self._resized: list[str] = []  # whose shapes have differed

    def sync(self) -> list[str]:
        """Called after an update: broadcasts the first rank's values of the buffers that differ, if their shapes are
        equal. Returns the sentence about them when it is first known. Collective.

        Buffers are compared after the updates 1, 2, 4, 8, …
        """
        if self._mesh.ranks == 1:
            return []
        self._updates += 1
        is_known = bool(self._diverging)
        if self._updates & (self._updates - 1) == 0:
            changed, resized = self._compared()
            self._diverging += [name for name in changed if name not in self._diverging]
            self._resized += [name for name in resized if name not in self._resized]
        if not self._diverging:
            return []
        buffers = {name: tensor for name, tensor in self._named() if name in self._diverging}
        rows = [[name, tensor.shape] for name, tensor in buffers.items()] if self._mesh.reads else []
        rows_of_ranks = self._mesh.gather(rows)
        resized, shapes = _unequal(rows_of_ranks), dict(row for rows in rows_of_ranks for row in rows)
        for name in self._diverging:
            if name in buffers and name not in resized:
                self.give(buffers[name], shapes.get(name))
        return [] if is_known else self._sentences(self._diverging, [])

    def differences(self) -> list[str]:
        """Sentences about buffers with other values, or shapes, than on one process; the same on every rank. Compares
        once more, and exchanges nothing. Collective."""
        if self._mesh.ranks == 1:
            return []
        changed, resized = self._compared()
        return self._sentences([*self._diverging, *changed], [*self._resized, *resized])

    def _sentences(self, changed: list[str], resized: list[str]) -> list[str]:
        sentences, changed = [], list(dict.fromkeys(changed))
        if changed:
            which = f"buffer {changed[0]}" + (and_more(changed, phrase=" and {} more are") or " is")
            outcome = ", and all ranks go on with the first one's" if changed[0] in self._diverging else ""
            sentences = [f"{which} updated by forward from each rank's own samples{outcome}; {_REMEDY}"]
        if resized := [name for name in dict.fromkeys(resized) if name not in changed]:
            which = f"buffer {resized[0]}" + (and_more(resized, phrase=" and {} more have") or " has")
            sentences.append(
                f"{which} another shape on each rank, by its samples, so each rank keeps its own{CAN_DIFFER}"
            )
        return sentences

    def _compared(self) -> tuple[list[str], list[str]]:
        """The buffers that differ now, in values alone and in shapes, between ranks that have them. Collective."""
        named = self._named() if self._mesh.reads else []
        sums = digests(tensor for _, tensor in named)
        rows_of_ranks = self._mesh.gather(
            [[name, tensor.shape, *pair] for (name, tensor), pair in zip(named, sums, strict=True)]
        )
        resized = _unequal([row[:2] for row in rows] for rows in rows_of_ranks)
        return [name for name in _unequal(rows_of_ranks) if name not in resized], resized

    @paddle.no_grad()
    def give(self, tensor: paddle.Tensor, shape: list[int] | None = None) -> None:
        """Broadcasts the first reader's values of a tensor, whose shape there is `shape`, or the same on every rank.
        A server's tensor takes that shape; a reader's of another shape stays as it is. Collective."""
        if shape is not None and tensor.shape != shape:
            self.give(received := paddle.empty(shape, tensor.dtype))
            if not self._mesh.reads:
                paddle.assign(received, tensor)
            return
        if not tensor.size:
            return
        bits = bits_of(tensor)
        for group in self._groups:
            if group is None:
                self._mesh.broadcast(bits, source := self._mesh.readers[0])
                while source in self._mesh.lost:  # it may have died during the broadcast
                    self._mesh.broadcast(bits, source := self._mesh.readers[0])
            else:
                dist.broadcast(bits, group.ranks[0], group)
        tensor.set_value(from_bits(bits, tensor))


def _unequal(rows_of_ranks: Iterable[list[list[Any]]]) -> list[str]:
    """The names with unequal values in rows [name, value, …] of several ranks."""
    first: dict[str, list[Any]] = {}
    rows = [row for rows in rows_of_ranks for row in rows]
    return list(dict.fromkeys(name for name, *value in rows if first.setdefault(name, value) != value))


@paddle.no_grad()
def copies(buffers: Sequence[paddle.Tensor | None]) -> list[paddle.Tensor | None]:
    """Copies of layers' buffers, for another forward. They share memory as the buffers do: a buffer that several layers
    share has one copy, and copies of a tensor and of its views, or of views of one tensor, are views of one copy.

    Two kinds stay as they are: `_dropout_state` of Paddle's LSTM and GRU, which has no memory on a CPU, and a weight
    that a layer's hook has computed (spectral_norm), for a gradient flows through it to the trained one. Raises
    UsageError for buffers of two dtypes that share memory.
    """
    copied = {id(buffer): buffer for buffer in buffers if buffer is not None and _is_copied(buffer)}
    copy_by_id: dict[int, paddle.Tensor] = {}
    for sharing in _by_memory(copied.values()):
        if len(sharing) == 1:
            copy_by_id[id(sharing[0])] = sharing[0].detach().clone()
            continue
        if len({buffer.dtype for buffer in sharing}) > 1:
            shapes = " and ".join(f"{buffer.dtype} {buffer.shape}" for buffer in sharing[:2])
            raise UsageError(
                f"buffers of the model share memory with two dtypes, {shapes}: give one a clone()."
            )
        start, end = sharing[0].data_ptr(), max(_end(buffer) for buffer in sharing)
        memory = _strided(sharing[0], [(end - start) // sharing[0].element_size()], [1], start).clone()
        for buffer in sharing:
            address = memory.data_ptr() + buffer.data_ptr() - start
            copy_by_id[id(buffer)] = _strided(memory, buffer.shape, buffer.strides, address)
    return [copy_by_id.get(id(buffer), buffer) for buffer in buffers]


def _strided(
    tensor: paddle.Tensor, shape: Sequence[int], strides: Sequence[int], address: int
) -> paddle.Tensor:
    """A view of a tensor's memory that begins at an address."""
    # Paddle 3.3.1 counts the offset in bytes, from the beginning of the memory, not from the tensor's.
    offset = address - paddle.as_strided(tensor, [1], [1]).data_ptr()
    view = paddle.as_strided(tensor, shape, strides, offset)
    assert view.data_ptr() == address, "as_strided counts its offset in another way"
    return view


def _is_copied(buffer: paddle.Tensor) -> bool:
    return buffer._is_initialized() and buffer.stop_gradient and bool(buffer.size)


def _by_memory(tensors: Iterable[paddle.Tensor]) -> list[list[paddle.Tensor]]:
    """Tensors in groups, in the order of their addresses; groups share no byte."""
    groups: list[list[paddle.Tensor]] = []
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.data_ptr()):
        if tensor.data_ptr() < end:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
        end = max(end, _end(tensor))
    return groups


def _end(tensor: paddle.Tensor) -> int:
    """The address of the byte after a tensor's last element."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def bits_of(tensor: paddle.Tensor) -> paddle.Tensor:
    """A copy of a tensor's bytes as uint8, for an exchange: gloo does not support every dtype."""
    flat = tensor.detach().contiguous().reshape([-1])
    return (flat.astype("uint8") if tensor.dtype == paddle.bool else flat.view("uint8")).clone()


def from_bits(bits: paddle.Tensor, like: paddle.Tensor) -> paddle.Tensor:
    """The inverse, for a tensor of the shape and dtype of `like`."""
    return (bits.astype("bool") if like.dtype == paddle.bool else bits.view(like.dtype)).reshape(like.shape)


def give_unusual(model: nn.Layer, mesh: Mesh) -> None:
    """Broadcasts the first rank's tensors that Paddle's broadcast cannot handle. Collective.

    Paddle's refuses empty tensors, loses non-contiguous ones, and over gloo ends the process for buffers and frozen
    weights of most dtypes (3.3.1: "Invalid data type"). Call this first: Paddle's then skips empty tensors and those
    dtypes.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        odd = tensor.stop_gradient and dtype_of(tensor) not in _USUAL
        if tensor._is_initialized() and (odd or not tensor.is_contiguous()):
            Buffers(list, mesh).give(tensor)
        if odd or not tensor.size:
            tensor.no_sync = True
