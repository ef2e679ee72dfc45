"""The parameters that objects and functions hold. A function's globals count by the names in its code."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import paddle
from paddle import nn
from paddle.base.framework import EagerParamBase as Parameter

from paddle_dp.identity.walk import DEPTH, MAX_ENTRIES, is_library, readable_attributes, registered_parameters


def parameters_within(things: Iterable[Any]) -> list[paddle.Tensor]:
    """The parameters that objects, layers and functions hold, themselves or in layers: in attributes, lists, closures,
    partials, and globals that a function names, to a depth. Whether a forward uses them is not known.

    A value that raises where it is looked at, such as a closed file or a dead proxy, counts as empty."""
    reached: dict[int, Any] = {}
    level = [*things]
    for _ in range(DEPTH + 1):
        new = {id(value): value for value in level if id(value) not in reached}
        reached |= new
        level = [inner for value in new.values() for inner in _values_within(value)]
    parameters = [
        p for v in reached.values() if issubclass(type(v), nn.Layer) for p in registered_parameters(v)
    ]
    parameters += [value for value in reached.values() if issubclass(type(value), Parameter)]
    return [*{id(parameter): parameter for parameter in parameters}.values()]


def _values_within(value: Any) -> list[Any]:
    try:
        return _entries_of(value)
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return []


def _entries_of(value: Any) -> list[Any]:
    kind = type(value)  # `isinstance` also reads value.__class__, which a proxy computes
    if issubclass(kind, (list, tuple, dict)):
        if len(value) > MAX_ENTRIES:
            return []
        return [*(value.values() if issubclass(kind, dict) else value)]
    if issubclass(kind, (type, ModuleType, paddle.Tensor)):
        return []
    values = [*readable_attributes(value).values()]
    if issubclass(kind, nn.Layer):
        return [*values, *(child for _, child in nn.Layer.named_children(value))]
    if kind is MethodType:
        return [*values, value.__self__]
    if kind is FunctionType and not is_library(value.__module__):
        named = [value.__globals__.get(name) for name in value.__code__.co_names]
        return [*values, *(each for each in named if each is not None)]
    return [*values, value.func] if issubclass(kind, partial) else values
