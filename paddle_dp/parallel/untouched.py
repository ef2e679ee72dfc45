"""Around a trial of a model or a loss: nothing of it is left in them, or in any generator of random numbers."""

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

from paddle_dp.parallel.own_code import is_library

_LARGEST = 10_000  # entries of a container whose entries are looked into


@contextmanager
def untouched(*owners: Any) -> Iterator[None]:
    """Inside, layers and other objects may change what they hold and draw what they like.

    Put back are attributes (modes, too), parameters and buffers, what lies in their lists, dicts, sets, arrays and own
    objects, sublayers that are made on the way, and the generators of Paddle, NumPy and Python.
    """
    found = [
        one for owner in owners if isinstance(owner, nn.Layer) for one in owner.sublayers(include_self=True)
    ]
    layers = list({id(layer): layer for layer in found}.values())
    kept = _Kept()
    for layer in layers:
        for table in (vars(layer), layer._buffers, layer._parameters, layer._sub_layers):
            kept.take(table)
    for owner in owners:
        if not isinstance(owner, nn.Layer):
            kept.take(owner)
            kept.take(getattr(owner, "__dict__", None))
    drawn = paddle.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        kept.put_back()
        paddle.set_rng_state(drawn[0])
        np.random.set_state(drawn[1])
        random.setstate(drawn[2])


class _Kept:
    """Copies of what can be changed where it lies, and how each is put back."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # holds on to them: a number is an object's own only while it lives
        self._back: list[Callable[[], None]] = []

    def take(self, value: Any) -> None:
        """Takes a value, and what lies in it, but no layer: the layers' tables are taken one by one."""
        if id(value) in self._seen or isinstance(value, (nn.Layer, type, ModuleType)):
            return
        self._seen[id(value)] = value
        if isinstance(value, paddle.Tensor):
            self._take_tensor(value)
        elif isinstance(value, np.ndarray):
            self._back.append(_filler(value, value.copy()))
        elif isinstance(value, (dict, list, deque, set, tuple)):
            self._take_container(value)
        elif isinstance(value, FunctionType):
            for cell in (value.__closure__ or ()) if not is_library(value.__module__) else ():
                self._take_cell(cell)
        elif not is_library(type(value).__module__) and isinstance(
            own := getattr(value, "__dict__", None), dict
        ):
            self.take(own)

    def put_back(self) -> None:
        with paddle.no_grad():
            for back in self._back:
                back()

    def _take_container(self, value: Any) -> None:
        """What is in it, and what is in that."""
        if isinstance(value, (dict, set)):
            content = dict(value) if isinstance(value, dict) else set(value)
            self._back.append(_refiller(value.clear, value.update, content))
        elif not isinstance(value, tuple):
            self._back.append(_refiller(value.clear, value.extend, list(value)))
        if len(value) <= _LARGEST:
            for one in list(value.values() if isinstance(value, dict) else value):
                self.take(one)

    def _take_cell(self, cell: CellType) -> None:
        """A variable of the function around, which the one within may set."""
        if cell == CellType():
            return  # not yet set
        content = cell.cell_contents
        self._back.append(lambda: setattr(cell, "cell_contents", content))
        self.take(content)

    @paddle.no_grad()
    def _take_tensor(self, tensor: paddle.Tensor) -> None:
        """With its values of now; but `_dropout_state` of Paddle's LSTM and GRU, which has no memory on a CPU."""
        if tensor._is_initialized():
            value = tensor.clone()
            self._back.append(lambda: tensor.set_value(value))


def _filler(array: np.ndarray, values: np.ndarray) -> Callable[[], None]:
    def back() -> None:
        if array.flags.writeable:
            array[...] = values

    return back


def _refiller(clear: Callable[[], None], fill: Callable[[Any], None], content: Any) -> Callable[[], None]:
    def back() -> None:
        clear()
        fill(content)

    return back
