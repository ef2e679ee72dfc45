"""New values of parameters, from their owners to all ranks, on accelerators: they travel until somebody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn

from paddle_dp.mesh.traffic import traffic
from paddle_dp.parallel.exchange.lanes import Lanes
from paddle_dp.parallel.exchange.memory import nbytes


class TravellingValues:
    """Broadcasts parameters from their owners in the order in which the model has them, mostly that of forward.

    Between `share` and the next use a parameter is on its way. Who reads one by its layer waits for it: each layer's
    own parameters are in a `Door`. So a forward begins with the first layers while the values of the last ones travel.
    Who has kept a parameter elsewhere must `settle` first. A wait is the device's, the host goes on.

    `begin` is called before each update's forward. It waits for what the forward before did not read by its layer, and
    for what a layer keeps outside of its parameters, as recurrent layers keep their weights in a list.
    """

    def __init__(
        self, model: nn.Layer, parameters: Sequence[paddle.Tensor], owners: Sequence[int], lanes: Lanes
    ):
        """`owners`: a global rank for each of the parameters."""
        self._weights, self._owners, self._lanes = parameters, owners, lanes
        self._ranks = len(lanes.groups[0].ranks)
        self._tasks: dict[int, Any] = {}  # by place: of what is on its way
        self._read: set[int] = set()  # between the last `begin` and `share`, by their layers
        self._noting = False
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._kept = {places[id(t)] for t in _kept_elsewhere(model) if id(t) in places}
        for layer in model.sublayers(include_self=True):
            own = {name: places[id(p)] for name, p in layer._parameters.items() if id(p) in places}
            if own:
                # Not by __setattr__, which would take the table for a setting of the layer.
                layer.__dict__["_parameters"] = Door(layer._parameters, own, self.wait)

    @paddle.no_grad()
    def share(self) -> None:
        """Begins to send this rank's own parameters to all others, and to take theirs. Collective."""
        self.settle()
        self._noting = False
        for place, (parameter, owner) in enumerate(zip(self._weights, self._owners, strict=True)):
            traffic.reduced(nbytes(parameter), self._ranks)
            self._tasks[place] = dist.broadcast(parameter, owner, self._lanes.of(owner), sync_op=False)

    def wait(self, places: Iterable[int]) -> None:
        """Until these have their new values."""
        for place in places:
            if self._noting:
                self._read.add(place)
            task = self._tasks.pop(place, None)
            if task is not None:
                task.wait()

    def settle(self) -> None:
        """Until all parameters have their new values, and none is read by a broadcast."""
        for task in self._tasks.values():
            task.wait()
        self._tasks.clear()

    def begin(self) -> None:
        """Before an update's forward."""
        read, self._read, self._noting = self._read - self._kept, set(), True
        for place in [place for place in self._tasks if place not in read]:
            self._tasks.pop(place).wait()


class Door(dict[str, Any]):
    """A layer's table of parameters, by their names, that calls `wait` with the places of those that are read."""

    def __init__(self, table: dict[str, Any], places: dict[str, int], wait: Callable[[Iterable[int]], None]):
        super().__init__(table)
        self._places, self._wait = places, wait

    def __getitem__(self, name: str) -> Any:
        if name in self._places:
            self._wait((self._places[name],))
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._wait([place for own, place in self._places.items() if own == name])
        return super().get(name, default)

    def items(self) -> Any:
        self._wait(self._places.values())
        return super().items()

    def values(self) -> Any:
        self._wait(self._places.values())
        return super().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)  # a copied or saved layer waits for nothing


def _kept_elsewhere(model: nn.Layer) -> Iterator[paddle.Tensor]:
    """Tensors that layers keep in attributes, and in lists, tuples and dictionaries there."""
    for layer in model.sublayers(include_self=True):
        for name, value in vars(layer).items():
            if name not in ("_parameters", "_buffers", "_sub_layers"):
                yield from _tensors_in(value)


def _tensors_in(value: Any) -> Iterator[paddle.Tensor]:
    if isinstance(value, paddle.Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for one in value:
            yield from _tensors_in(one)
    elif isinstance(value, dict) and not isinstance(value, Door):
        for one in value.values():
            yield from _tensors_in(one)
