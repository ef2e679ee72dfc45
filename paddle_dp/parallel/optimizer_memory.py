"""What an optimizer of somebody's own remembers besides its state_dict: no checkpoint holds it."""

from __future__ import annotations

import dis
import inspect
import zlib
from collections import deque
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import numpy as np
import paddle


class OptimizerMemory:
    """Looks at an optimizer's attributes when it is made, and tells which of them training has changed since."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer
        self._made_with = self._attributes()

    def lost(self) -> list[str]:
        """The attributes that changed and stand neither in the optimizer's state_dict nor in the model."""
        if is_known(type(self.optimizer)):
            return []
        saved = self.optimizer.state_dict()
        return [
            name
            for name, value in self._attributes().items()
            if value != self._made_with.get(name) and name not in saved and name.lstrip("_") not in saved
        ]

    def _attributes(self) -> dict[str, Any]:
        kind = type(self.optimizer)
        if is_known(kind):
            return {}
        usual = set_by_paddle(kind)
        lists = (getattr(self.optimizer, "_parameter_list", None) or [], self.optimizer.state_dict().values())
        known = {id(tensor) for some in lists for tensor in some}
        own = {name: v for name, v in vars(self.optimizer).items() if name not in usual}
        return {name: found for name, v in own.items() if (found := _digest(v, known)) is not None}


def is_known(kind: type) -> bool:
    """Whether it is an optimizer of Paddle's or of this package, whose states are known to be saved."""
    return kind.__module__.partition(".")[0] in ("paddle", "paddle_dp")


def set_by_paddle(kind: type) -> frozenset[str]:
    """The attributes that an optimizer has from the classes of Paddle's that it derives from."""
    within = [base for base in kind.__mro__ if base.__module__.startswith("paddle.")]
    functions = [
        inspect.unwrap(f) for base in within for f in vars(base).values() if isinstance(f, FunctionType)
    ]
    lines = (line for function in functions for line in dis.get_instructions(function))
    return frozenset(line.argval for line in lines if line.opname == "STORE_ATTR")


def _digest(value: Any, known: set[int]) -> Any:
    """Something that is equal for equal values; None for what is no memory, or what a checkpoint holds."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, paddle.Tensor):
        if id(value) in known or not value._is_initialized():
            return None
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return zlib.crc32(np.ascontiguousarray(value).tobytes())
    if isinstance(value, Mapping):
        return [(repr(key), _digest(inner, known)) for key, inner in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [_digest(inner, known) for inner in value]
    return None
