"""Trials of a model and its loss before or beside training: afterwards everything is as it was."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.parallel.batch_norm import statistics
from paddle_dp.parallel.own_code import is_library

_LARGEST = 10_000  # entries of a container whose entries are looked into


def random_state() -> list[Any]:
    """Compares equal as long as nothing was drawn from Paddle's generators, and none was set."""
    return [state.__getstate__() for state in paddle.get_rng_state()]


@contextmanager
def trial(model: nn.Layer, *more: nn.Layer) -> Iterator[None]:
    """Around forwards without gradients: restores modes, buffers, running statistics and Paddle's generators.

    `more` are layers whose modes are restored, too. Unlike `restored`, it copies no parameters and no attributes, so
    that it is cheap for large models.
    """
    layers = [layer for root in (model, *more) for layer in root.sublayers(include_self=True)]
    modes = [(layer, layer.training) for layer in layers]
    tensors = [*statistics(model).values(), *model.buffers()]
    with paddle.no_grad():
        values = [(tensor, tensor.clone()) for tensor in tensors if tensor._is_initialized()]
        state = paddle.get_rng_state()
        try:
            yield
        finally:
            paddle.set_rng_state(state)
            for tensor, value in values:
                tensor.set_value(value)
            for layer, training in modes:
                layer.training = training


@contextmanager
def restored(*owners: Any) -> Iterator[None]:
    """Around a trial in which layers and other objects may change themselves and draw random numbers.

    Restored are attributes (modes, too), parameters and buffers, what lies in their lists, dicts, sets, arrays and own
    objects, sublayers that are made on the way, and the generators of Paddle, NumPy and Python.
    """
    found = [
        one for owner in owners if isinstance(owner, nn.Layer) for one in owner.sublayers(include_self=True)
    ]
    layers = list({id(layer): layer for layer in found}.values())
    snapshot = _Snapshot()
    for layer in layers:
        for table in (vars(layer), layer._buffers, layer._parameters, layer._sub_layers):
            snapshot.save(table)
    for owner in owners:
        if not isinstance(owner, nn.Layer):
            snapshot.save(owner)
            snapshot.save(getattr(owner, "__dict__", None))
    generators = paddle.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        snapshot.restore()
        paddle.set_rng_state(generators[0])
        np.random.set_state(generators[1])
        random.setstate(generators[2])


def buffers_before(model: nn.Layer, loss: Any = None) -> Callable[[], None]:
    """A function that gives the buffers and running statistics of now back to a model, and to a loss that is a layer;
    also buffers whose tensor a forward replaces."""
    snapshot = _Snapshot()
    for root in (model, loss):
        if isinstance(root, nn.Layer):
            for layer in root.sublayers(include_self=True):
                if layer._buffers:
                    snapshot.save(layer._buffers)
            snapshot.save(list(statistics(root).values()))
    return snapshot.restore


class _Snapshot:
    """Copies of what can be changed in place, with how each is restored."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # keeps them alive: an id is unique only as long
        self._undo: list[Callable[[], None]] = []

    def save(self, value: Any) -> None:
        """Saves a value and what it contains, but no layer: the layers' tables are saved one by one."""
        if id(value) in self._seen or isinstance(value, (nn.Layer, type, ModuleType)):
            return
        self._seen[id(value)] = value
        if isinstance(value, paddle.Tensor):
            self._save_tensor(value)
        elif isinstance(value, np.ndarray):
            self._undo.append(_filler(value, value.copy()))
        elif isinstance(value, (dict, list, deque, set, tuple)):
            self._save_container(value)
        elif isinstance(value, FunctionType):
            for cell in (value.__closure__ or ()) if not is_library(value.__module__) else ():
                self._save_cell(cell)
        elif not is_library(type(value).__module__) and isinstance(
            own := getattr(value, "__dict__", None), dict
        ):
            self.save(own)

    def restore(self) -> None:
        with paddle.no_grad():
            for undo in self._undo:
                undo()

    def _save_container(self, value: Any) -> None:
        """Saves its entries, and theirs."""
        if isinstance(value, (dict, set)):
            content = dict(value) if isinstance(value, dict) else set(value)
            self._undo.append(_refiller(value.clear, value.update, content))
        elif not isinstance(value, tuple):
            self._undo.append(_refiller(value.clear, value.extend, list(value)))
        if len(value) <= _LARGEST:
            for one in list(value.values() if isinstance(value, dict) else value):
                self.save(one)

    def _save_cell(self, cell: CellType) -> None:
        """A variable of the function around, which the one within may set."""
        if cell == CellType():
            return  # not yet set
        content = cell.cell_contents
        self._undo.append(lambda: setattr(cell, "cell_contents", content))
        self.save(content)

    @paddle.no_grad()
    def _save_tensor(self, tensor: paddle.Tensor) -> None:
        """With its values of now; but `_dropout_state` of Paddle's LSTM and GRU, which has no memory on a CPU."""
        if tensor._is_initialized():
            value = tensor.clone()
            self._undo.append(lambda: tensor.set_value(value))


def _filler(array: np.ndarray, values: np.ndarray) -> Callable[[], None]:
    def undo() -> None:
        if array.flags.writeable:
            array[...] = values

    return undo


def _refiller(clear: Callable[[], None], fill: Callable[[Any], None], content: Any) -> Callable[[], None]:
    def undo() -> None:
        clear()
        fill(content)

    return undo
