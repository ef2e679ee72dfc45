"""Plain Python attributes with state that no checkpoint holds: of models, losses, schedules and optimizers, including a
user-defined optimizer's state outside its state_dict."""

from __future__ import annotations

import dis
import inspect
import random
import warnings
import zlib
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import CellType, FunctionType, GeneratorType
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.identity.library_code import is_library


class OptimizerMemory:
    """Digests an optimizer's attributes when it is created, and lists those that training has changed since.

    `parameters`: those it updates.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[paddle.Tensor]):
        self.optimizer, self._parameters = optimizer, parameters
        self._initial = self._attributes()

    def lost(self) -> list[str]:
        """The changed attributes of the optimizer and of parameters that neither its state_dict nor the model saves."""
        if is_known(type(self.optimizer)):
            return []
        saved = self.optimizer.state_dict()
        return [
            name
            for name, value in self._attributes().items()
            if value != self._initial.get(name) and name not in saved and name.lstrip("_") not in saved
        ]

    def _attributes(self) -> dict[str, Any]:
        kind = type(self.optimizer)
        if is_known(kind):
            return {}
        usual = set_by_paddle(kind)
        lists = (self._parameters, self.optimizer.state_dict().values())
        known = {id(tensor) for some in lists for tensor in some}
        user_attributes = {name: v for name, v in vars(self.optimizer).items() if name not in usual}
        found = {name: told for name, v in user_attributes.items() if (told := digest(v, known)) is not None}
        return found | on_parameters(self._parameters)


def is_known(kind: type) -> bool:
    """Whether it is an optimizer of Paddle or of this package: all their state is saved."""
    return kind.__module__.partition(".")[0] in ("paddle", "paddle_dp")


_DEPTH = 4  # levels of nested objects that are read
_MAX_ARRAY_BYTES = 2**26  # larger arrays are not read


class Attributes:
    """Digests the attributes of objects when it is created, and lists those that training has changed since.

    `owners`: objects by their name in messages; objects of library classes are left out.
    """

    def __init__(self, owners: Mapping[str, Any]):
        self._owners = {word: owner for word, owner in owners.items() if not is_library(_module_of(owner))}
        self._initial = self._digests()

    def changed(self) -> list[str]:
        """«model.layers.0.calls», «loss.warm»: the attributes that have changed or are new."""
        return [name for name, found in self._digests().items() if found != self._initial.get(name)]

    def _digests(self) -> dict[str, Any]:
        return {
            f"{word}.{name}": found
            for word, owner in self._owners.items()
            for name, value in attributes_of(owner).items()
            if (found := digest(value)) is not None
        }


def _module_of(owner: Any) -> str:
    return owner.__module__ if isinstance(owner, FunctionType) else type(owner).__module__


def attributes_of(owner: Any) -> dict[str, Any]:
    """User-defined attributes only: none that every layer has, that Paddle sets, or that a state_dict has."""
    if isinstance(owner, nn.Layer):
        return {name: value for name, value in vars(owner).items() if name not in _LAYER_ATTRIBUTES}
    if isinstance(owner, FunctionType):
        cells = zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    saved = owner.state_dict() if hasattr(owner, "state_dict") else {}
    known = {*saved, *set_by_paddle(type(owner))}
    return {name: value for name, value in getattr(owner, "__dict__", {}).items() if name not in known}


_LAYER_ATTRIBUTES = frozenset(vars(nn.Layer()))


def digest(value: Any, known: Collection[int] = (), depth: int = _DEPTH) -> Any:
    """A value that is equal for equal values, including the states of generators. None for values that hold no state,
    or that a checkpoint holds (`known`)."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, paddle.Tensor):
        if id(value) in known or not value._is_initialized():
            return None
        value = value.numpy() if value.size * value.element_size() <= _MAX_ARRAY_BYTES else None
    if isinstance(value, (np.ndarray, np.generic)):
        return zlib.crc32(np.ascontiguousarray(value).tobytes()) if value.nbytes <= _MAX_ARRAY_BYTES else None
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, Mapping):
        return [(repr(key), digest(inner, known, depth)) for key, inner in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [digest(inner, known, depth) for inner in value]
    if (state := _state_of_generator(value)) is not None:
        return zlib.crc32(repr(state).encode())
    user_attributes = getattr(value, "__dict__", None)
    if depth and isinstance(user_attributes, dict) and not isinstance(value, (type, nn.Layer)):
        return (
            _digest_attributes(value, user_attributes, known, depth)
            if not is_library(type(value).__module__)
            else None
        )
    return None


def _state_of_generator(value: Any) -> Any:
    """The state of a random generator or of an iterator; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return frame and (
            frame.f_lasti,
            sorted((name, digest(inner)) for name, inner in frame.f_locals.items()),
        )
    if isinstance(value, Iterator):
        with warnings.catch_warnings(), suppress(TypeError):
            warnings.simplefilter("ignore", DeprecationWarning)  # from itertools, since Python 3.12
            return value.__reduce__()
    return None


def _digest_attributes(
    value: Any, user_attributes: Mapping[str, Any], known: Collection[int], depth: int
) -> Any:
    return [
        (name, digest(inner, known, depth - 1))
        for name, inner in user_attributes.items()
        if inner is not value
    ]


def on_parameters(parameters: Iterable[paddle.Tensor]) -> dict[str, Any]:
    """Attributes set on parameters, by «parameter.attribute», except `main_grad`, fleet's gradient."""
    return {
        f"{parameter.name}.{name}": found
        for parameter in parameters
        for name, value in getattr(parameter, "__dict__", {}).items()
        if name != "main_grad" and (found := digest(value)) is not None
    }


def set_by_paddle(kind: type) -> frozenset[str]:
    """The attributes that a class inherits from Paddle's classes."""
    within = [base for base in kind.__mro__ if base.__module__.startswith("paddle.")]
    functions = [
        inspect.unwrap(f) for base in within for f in vars(base).values() if isinstance(f, FunctionType)
    ]
    lines = (line for function in functions for line in dis.get_instructions(function))
    return frozenset(line.argval for line in lines if line.opname == "STORE_ATTR")
