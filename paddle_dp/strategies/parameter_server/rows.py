"""Rows of embedding tables instead of tables, between workers and servers in step (`strategy.pulls: rows`).

A batch reads few rows of a large table. A worker pulls a row when its `nn.Embedding` is about to read it: a hook has
the forward's own indices, so the layer cannot read a row that was not pulled. After the last backward the worker pushes
the gradients of the rows that it has read. A server adds them into one dense gradient, in the order of ranks, so its
update has the bits of `pulls: all`: AdamW also moves the rows without a gradient.

A forward that reads the layer's `weight` itself gets the whole table first (`_pulling`). Any other use is an error or
NaN: a gradient in a row that the layer has not read ends the training (`push`), and an update overwrites the rows on
the workers with NaN until they are pulled again, for a tensor that was kept aside and is read without a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.core.consistency import Replica
from paddle_dp.core.optimizer import Rate
from paddle_dp.core.placed_model import NamedTensors, PlacedModel
from paddle_dp.errors import UsageError
from paddle_dp.exchange.pushed_gradients import PushedGradients
from paddle_dp.learner.update import States, UpdateMode
from paddle_dp.mesh import Mesh, transport
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.strategies.parameter_server.served import (
    ServerOwners,
    ServerParams,
    ServerWeights,
    partners,
)
from paddle_dp.tensors import Array, bytes_from, bytes_of, dtype_of, moved_gradient, numbers_of

UPDATED = b"\x01"  # a server's message to each worker: its tables have the values of the next update
NO_GRADIENT = -1  # in place of a number of rows
NAN_BYTE = 0xFF  # a float of any width is NaN if all its bytes are this one


@dataclass
class Table:
    """The weight of one embedding, which is parameter `index` of the trained ones and which server `owner` updates.

    `fresh`, `reads`: the rows that have their newest values on this worker, and those that its forwards have read in
    this update, bool [rows].
    """

    name: str
    parameter: paddle.Tensor
    index: int
    owner: int
    fresh: Array = field(init=False)
    reads: Array = field(init=False)
    is_read_by_layer: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        count = self.parameter.shape[0]
        self.fresh, self.reads = np.ones(count, bool), np.zeros(count, bool)  # initial weights are everywhere

    @property
    def memory(self) -> Array:
        """A writable view of the values, uint8 [rows, bytes of a row]."""
        return bytes_of(self.parameter).reshape(len(self.fresh), -1)


def row_layers(model: nn.Layer) -> tuple[dict[str, nn.Embedding], dict[str, str]]:
    """The embeddings whose tables can travel by rows, and for the other embeddings the reason, each by the name of the
    weight. Raises UsageError if there is none of the former."""
    layers = model.named_sublayers(include_self=True)
    embeddings = {
        f"{name}.weight".lstrip("."): layer for name, layer in layers if isinstance(layer, nn.Embedding)
    }
    users = [id(p) for layer in model.sublayers(include_self=True) for p in layer.parameters(False)]
    dense = {
        name: reason
        for name, layer in embeddings.items()
        if (reason := _reason(layer, users.count(id(layer.weight))))
    }
    by_rows = {name: layer for name, layer in embeddings.items() if name not in dense}
    if not by_rows:
        reasons = "".join(f"; {name} {reason}" for name, reason in dense.items())
        raise UsageError(
            f"strategy.pulls=rows: {type(model).__name__} has no nn.Embedding whose weight it alone uses and that is "
            f"trained{reasons}. Set strategy.pulls=all."
        )
    return by_rows, dense


def _reason(layer: nn.Embedding, uses: int) -> str:
    """Why a table cannot travel by rows; "" if it can."""
    if layer.weight.stop_gradient:
        return "is frozen"
    if uses > 1:
        return "also belongs to another layer, which reads all rows"
    if layer._max_norm is not None:
        return "is scaled by its forward (max_norm)"
    if type(layer).forward is not nn.Embedding.forward:
        return f"has another forward, in {type(layer).__name__}"
    return ""


def _pulling(
    kind: type[nn.Embedding], table: Table, pull: Callable[[Table, Array], None]
) -> type[nn.Embedding]:
    """The class of a layer whose `weight` is the whole fresh table for everybody but its own forward."""

    def attribute(layer: nn.Embedding, name: str) -> Any:
        if name == "weight" and not table.is_read_by_layer:
            pull(table, np.flatnonzero(~table.fresh))
        return kind.__getattr__(layer, name)

    return type(kind.__name__, (kind,), {"__getattr__": attribute, "__module__": kind.__module__})


class RowTables:
    """The tables that travel by rows: a worker asks their servers for rows, which answer from a thread that reads
    messages.

    A server's table changes in its update alone, which it makes after each worker's last gradient, and a worker asks
    after that server's `UPDATED`. So an answer has the values of one update. `Averages.in_place` writes into tables
    too, after an evaluation that all ranks have ended, and then shares them.
    """

    def __init__(self, mesh: Mesh, model: nn.Layer, deal: ServerOwners):
        self._mesh, self._peers = mesh, [rank for rank in partners(mesh) if rank != mesh.rank]
        indices = {id(parameter): index for index, parameter in enumerate(deal.parameters)}
        layers, dense = row_layers(model)
        self.tables: dict[int, Table] = {}
        for name, layer in layers.items():
            index = indices.get(id(layer.weight))
            if index is None:
                dense[name] = "is frozen"
                continue
            table = self.tables[index] = Table(name, layer.weight, index, deal.owners[index])
            if mesh.reads:
                layer.register_forward_pre_hook(partial(self._before_forward, table), with_kwargs=True)
                layer.register_forward_post_hook(partial(self._after_forward, table))
                layer.__class__ = _pulling(type(layer), table, self._pull)
        if not mesh.reads:
            transport.endpoint().answer(CHANNELS["rows"], self._answer)
        if mesh.is_main:
            for name, reason in dense.items():
                print(f"strategy.pulls=rows: all of {name} travels, because it {reason}", file=sys.stderr)

    def _before_forward(
        self, table: Table, _: nn.Layer, inputs: Sequence[Any], keywords: Mapping[str, Any]
    ) -> None:
        indices = inputs[0] if inputs else keywords.get("x", keywords.get("input"))
        table.is_read_by_layer = True
        rows = np.unique(indices.numpy())
        rows = rows[(rows >= 0) & (rows < len(table.fresh))]  # Paddle refuses the others
        table.reads[rows] = True
        self._pull(table, rows[~table.fresh[rows]])

    def _after_forward(self, table: Table, *_: Any) -> None:
        table.is_read_by_layer = False

    def _pull(self, table: Table, rows: Array) -> None:
        if not rows.size:
            return
        request = np.array([table.index, *rows.tolist()], "<i8")
        transport.endpoint().send(CHANNELS["rows"], table.owner, memoryview(request.tobytes()))
        with heartbeat.waiting(f"rows of {table.name}"):
            data = transport.endpoint().receive(CHANNELS["rows"], table.owner)
        table.memory[rows] = np.frombuffer(data, np.uint8).reshape(len(rows), -1)
        table.fresh[rows] = True

    def _answer(self, rank: int, data: bytearray) -> None:
        index, rows = np.frombuffer(data, "<i8", 1)[0], np.frombuffer(data, "<i8", offset=8)
        transport.endpoint().send(
            CHANNELS["rows"], rank, self.tables[int(index)].memory[rows].reshape(-1).data
        )

    def begin_update(self) -> None:
        for table in self.tables.values():
            table.reads[:] = False

    def pull_all(self) -> None:
        """On a worker, pulls all rows that are not fresh."""
        for table in self.tables.values() if self._mesh.reads else ():
            self._pull(table, np.flatnonzero(~table.fresh))

    def refresh(self) -> None:
        """Notes that all rows have arrived."""
        for table in self.tables.values():
            table.fresh[:] = True

    def expire(self) -> None:
        """Ends the updates of all servers: a worker's rows are old from now on, and NaN."""
        if not self._mesh.reads:
            for rank in self._peers:
                transport.endpoint().send(CHANNELS["rows"], rank, memoryview(UPDATED))
            return
        for rank in self._peers:
            transport.endpoint().receive(CHANNELS["rows"], rank)
        for table in self.tables.values():
            table.memory[table.fresh] = NAN_BYTE
            table.fresh[:] = False

    @paddle.no_grad()
    def push(self) -> list[int]:
        """On a worker, sends the gradients of the rows that it has read. Returns the indices of the tables without a
        gradient. Raises UsageError for a gradient in another row."""
        lacking = [index for index, table in self.tables.items() if table.parameter.grad is None]
        for index, table in self.tables.items():
            message = [np.array([NO_GRADIENT], "<i8")]
            if index not in lacking:
                dtype, rows = dtype_of(table.parameter), np.flatnonzero(table.reads).astype("<i8")
                gradient = bytes_of(moved_gradient(table.parameter)).reshape(len(table.reads), -1)
                message = [np.array([len(rows)], "<i8"), rows, gradient[rows]]
                gradient[rows] = 0
                if numbers_of(gradient, dtype).any():
                    raise UsageError(
                        f"strategy.pulls=rows: parameter '{table.name}' has a gradient in rows that its embedding did "
                        "not read in this update, so something else uses the table, too: set strategy.pulls=all."
                    )
            chunks = [memoryview(array.tobytes()) for array in message]
            transport.endpoint().send(CHANNELS["row_gradients"], table.owner, *chunks)
        return lacking

    @paddle.no_grad()
    def add_up(self) -> None:
        """On a server, adds the workers' gradients in the order of ranks, each as a dense one."""
        for table in self.tables.values():
            if table.owner != self._mesh.rank:
                continue
            total: Array | None = None
            for term in self._terms(table):
                total = term if total is None else np.add(total, term, out=total)
            if total is not None:
                gradient: Any = paddle.empty(table.parameter.shape, table.parameter.dtype)
                bytes_of(gradient)[:] = bytes_from(total.reshape(-1), dtype_of(table.parameter))
                table.parameter._copy_gradient_from(gradient)

    def _terms(self, table: Table) -> Iterator[Array]:
        """Yields each worker's gradient of a table, [rows, width], in the order of ranks."""
        for rank in self._peers:
            data = transport.endpoint().receive(CHANNELS["row_gradients"], rank)
            count = int(np.frombuffer(data, "<i8", 1)[0])
            if count == NO_GRADIENT:
                continue
            numbers = numbers_of(memoryview(data)[8 * (1 + count) :], dtype_of(table.parameter))
            term = np.zeros(table.parameter.shape, numbers.dtype)
            term[np.frombuffer(data, "<i8", count, 8)] = numbers.reshape(count, -1)
            yield term


class PushedRows(PushedGradients):
    """`PushedGradients` of all parameters but `tables`, whose rows follow after the last backward."""

    def __init__(self, tables: RowTables, deal: ServerOwners, mesh: Mesh):
        self._tables, self._reads = tables, mesh.reads
        self._dense = [index for index in range(len(deal.parameters)) if index not in tables.tables]
        super().__init__(
            partners(mesh),
            mesh.rank,
            [deal.parameters[index] for index in self._dense],
            [[deal.owners[index]] for index in self._dense],
            senders=mesh.axes.dp_size,
        )

    def finish(self) -> list[int]:
        # Before the end of the gradients, over the same link.
        lacking = self._tables.push() if self._reads else []
        lacking += [self._dense[position] for position in super().finish()]
        if not self._reads:
            self._tables.add_up()
        return sorted(lacking)


class RowWeights(ServerWeights):
    """Servers send the weights that they have updated, without `tables`, of which workers pull the rows that a forward
    reads. `wait` and `share` bring all rows."""

    description = "unrounded gradients, tables by rows"

    def __init__(
        self,
        mode: UpdateMode,
        mesh: Mesh,
        deal: ServerOwners,
        params: ServerParams,
        tables: RowTables,
        rate: Rate,
    ):
        super().__init__(mode, params)
        pairs = zip(deal.parameters, deal.owners, strict=True)
        dense = [pair for index, pair in enumerate(pairs) if index not in tables.tables]
        self._dense = ServerParams(mesh, [pair[0] for pair in dense], [pair[1] for pair in dense])
        self._tables, self._rate, self._open = tables, rate, 0

    def begin_update(self, number: int) -> UpdateMode:
        self._open = number
        self._tables.begin_update()
        return self.mode

    def publish(self) -> None:
        self._open = 0
        self._dense.share()
        self._tables.expire()

    def wait(self) -> None:
        # Else `Learner.update` calls, whose optimizer has no table of a worker.
        if self._open != self._rate.steps + 1:
            self._tables.pull_all()

    def share(self) -> None:
        super().share()
        self._tables.refresh()

    def compared(self, placed: PlacedModel, states: States) -> tuple[list[Replica], NamedTensors]:
        self._tables.pull_all()
        return super().compared(placed, states)
