"""Sends updated parameters from their owners to all ranks: on CPUs over the hosts' sockets, on accelerators while the
next forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_dp.core.data_group import CommGroups, Group
from paddle_dp.mesh.messages import Push
from paddle_dp.mesh.transport import traffic
from paddle_dp.tensors import nbytes


class AsyncParamBroadcast:
    """Broadcasts parameters from their owners in the model's order, which is mostly the order of forward.

    Between `share` and its next use a parameter is in flight. Reading it through its layer's `WaitingTable` waits for
    it, so a forward begins with the first layers while the last values still travel. Code that holds a parameter
    elsewhere must call `settle` first. The device waits, not the host.

    `begin`, called before each update's forward, waits for parameters that the previous forward did not read through
    their layers, and for parameters that a layer holds elsewhere, such as a recurrent layer's list of weights.
    """

    def __init__(
        self,
        model: nn.Layer,
        parameters: Sequence[paddle.Tensor],
        owners: Sequence[int],
        comm_groups: CommGroups,
    ):
        """`owners`: a global rank for each parameter."""
        self._weights, self._owners, self._comm_groups = parameters, owners, comm_groups
        self._ranks = len(comm_groups.groups[0].ranks)
        self._tasks: dict[int, Any] = {}  # by index: broadcasts in flight
        self._read: set[int] = set()  # through their layers, between the last `begin` and `share`
        self._noting = False
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._on_other_ranks = {indices[id(t)] for t in _tensors_on_other_ranks(model) if id(t) in indices}
        for layer in model.sublayers(include_self=True):
            index_of = {name: indices[id(p)] for name, p in layer._parameters.items() if id(p) in indices}
            if index_of:
                # Bypasses __setattr__, which would treat the table as a layer setting.
                layer.__dict__["_parameters"] = WaitingTable(layer._parameters, index_of, self.wait)

    @paddle.no_grad()
    def share(self) -> None:
        """Starts to send this rank's parameters to all others and to receive theirs. Collective."""
        self.settle()
        self._noting = False
        for index, (parameter, owner) in enumerate(zip(self._weights, self._owners, strict=True)):
            traffic.reduced(nbytes(parameter), self._ranks)
            self._tasks[index] = dist.broadcast(
                parameter, owner, self._comm_groups.group_of(owner), sync_op=False
            )

    def wait(self, indices: Iterable[int]) -> None:
        """Waits until these parameters have their new values."""
        for index in indices:
            if self._noting:
                self._read.add(index)
            task = self._tasks.pop(index, None)
            if task is not None:
                task.wait()

    def settle(self) -> None:
        """Waits until all parameters have their new values and no broadcast reads one."""
        for task in self._tasks.values():
            task.wait()
        self._tasks.clear()

    def begin(self) -> None:
        """Call it before an update's forward."""
        read, self._read, self._noting = self._read - self._on_other_ranks, set(), True
        for index in [index for index in self._tasks if index not in read]:
            self._tasks.pop(index).wait()


class WaitingTable(dict[str, Any]):
    """A layer's table of parameters by name, which calls `wait` with the indices of parameters that are read."""

    def __init__(self, table: dict[str, Any], indices: dict[str, int], wait: Callable[[Iterable[int]], None]):
        super().__init__(table)
        self._index_of, self._wait = indices, wait

    def __getitem__(self, name: str) -> Any:
        if name in self._index_of:
            self._wait((self._index_of[name],))
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._wait([index for key, index in self._index_of.items() if key == name])
        return super().get(name, default)

    def items(self) -> Any:
        self._wait(self._index_of.values())
        return super().items()

    def values(self) -> Any:
        self._wait(self._index_of.values())
        return super().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)  # a copied or saved layer does not wait


def _tensors_on_other_ranks(model: nn.Layer) -> Iterator[paddle.Tensor]:
    """Yields tensors that layers keep in attributes, also within lists, tuples and dictionaries."""
    for layer in model.sublayers(include_self=True):
        for name, value in vars(layer).items():
            if name not in ("_parameters", "_buffers", "_sub_layers"):
                yield from _tensors_in(value)


def _tensors_in(value: Any) -> Iterator[paddle.Tensor]:
    if isinstance(value, paddle.Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict) and not isinstance(value, WaitingTable):
        for item in value.values():
            yield from _tensors_in(item)


class ParamBroadcast:
    """Sends `parameters` from their `owners` (global ranks of the group) to all ranks.

    (n - 1)/n of all bytes leave each rank.
    """

    def __init__(self, group: Group, parameters: Sequence[paddle.Tensor], owners: Sequence[int]):
        self._params, self._owners = parameters, owners
        self._push = Push("values", group.ranks, group.ranks[group.rank])

    @paddle.no_grad()
    def share(self) -> None:
        """Sends the parameters that this rank owns to all others and receives theirs. Collective."""
        pairs = list(zip(self._params, self._owners, strict=True))
        for index, (parameter, owner) in enumerate(pairs):
            if owner == self._push.rank:
                self._push.send_all(index, parameter)
        with self._push.waiting("the exchange of updated parameters"):
            for parameter, owner in pairs:
                if owner != self._push.rank:
                    received = self._push.receive(owner)
                    assert received is not None
                    self._push.into(parameter, received[1])
