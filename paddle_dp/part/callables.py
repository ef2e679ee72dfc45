"""Refuses classes and functions that cannot be a part of a shelf, before anything is called.

A recipe is a program (SECURITY.md): this module cannot know the effects of imports or of a user's function. But
`use: os.system` is never a part, nor is a class of another kind than the shelf's.
"""

from __future__ import annotations

import functools
import sys
from inspect import isbuiltin, isfunction
from types import ModuleType
from typing import Any

# Each shelf's base class: its name, its package, and its name in messages. Names are compared, so that nothing is
# imported. METHODS: shelves on which a class needs one of some methods instead.
BASES = {
    "models": ("Layer", "paddle", "paddle.nn.Layer"),
    "adapters": ("Layer", "paddle", "paddle.nn.Layer"),
    "optimizers": ("Optimizer", "paddle", "paddle.optimizer.Optimizer"),
    "schedules": ("LRScheduler", "paddle", "paddle.optimizer.lr.LRScheduler"),
    "callbacks": ("Callback", "paddle_dp", "paddle_dp.Callback"),
}
METHODS = {
    "datasets": ("__getitem__", "__iter__"),
    "losses": ("__call__",),
    "strategies": ("place",),
}
# The modules of Paddle with functions that are or make parts; its other functions load files, start processes …
_OPERATIONS = (
    "paddle.nn.functional", "paddle.tensor", "paddle.incubate.nn.functional",
    "paddle.base.dygraph.generated_tensor_methods_patch",  # has gelu, tanh, abs …, made when Paddle is imported
)  # fmt: skip
PADDLE_MODULES = {"models": ("paddle.vision.models",), "losses": _OPERATIONS, "blocks": _OPERATIONS}


def validate_callable(called: Any, shelf: str) -> str | None:
    """The reason why `called` cannot be a part of the shelf, as the end of a sentence; None if it can.

    `shelf` is "blocks" for a function or layer in a model's chain.
    """
    while isinstance(called, functools.partial):
        called = called.func
    module = _module_of(called)
    if is_standard_library(module):
        return "is of Python's standard library, which holds no part of a training"
    if isinstance(called, type):
        return _wrong_class(called, shelf)
    if isbuiltin(called):
        return "is a function in C, whose settings cannot be checked"
    is_paddle_function = module.partition(".")[0] == "paddle" and isfunction(called)
    if is_paddle_function and not module.startswith(PADDLE_MODULES.get(shelf, ())):
        modules = " or ".join(PADDLE_MODULES.get(shelf, ())[:3])
        return f"is a function of Paddle's {module}{f'; parts are in {modules}' if modules else ', which makes none'}"
    return None


def is_standard_library(dotted: str) -> bool:
    """True if a dotted name belongs to Python's standard library."""
    return dotted.partition(".")[0] in sys.stdlib_module_names


def _module_of(called: Any) -> str:
    """The module of a class or function; for another object, of its class."""
    owner = called if isinstance(called, type) or hasattr(called, "__qualname__") else type(called)
    # A function in C, bound to its module or to an object.
    if (module := getattr(owner, "__module__", None)) is None:
        holder = getattr(called, "__self__", None)
        module = holder.__name__ if isinstance(holder, ModuleType) else type(holder).__module__
    return str(module)


def _wrong_class(kind: type[Any], shelf: str) -> str | None:
    name, package, written = BASES.get("models" if shelf == "blocks" else shelf, ("", "", ""))
    if name and not any(
        b.__name__ == name and b.__module__.partition(".")[0] == package for b in kind.__mro__
    ):
        return f"is a class that is not derived from {written}"
    methods = METHODS.get(shelf, ())
    if methods and not any(m in vars(base) for m in methods for base in kind.__mro__):
        return f"is a class without the method {' or '.join(methods)}"
    return None
