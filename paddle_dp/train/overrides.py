"""Refuses, before training, a callback with a method whose name resembles a moment's: the trainer would never call it.

Keras, Lightning and Paddle's `Model.fit` call `on_epoch_end(epoch, logs)`; a callback written for them would be
accepted and never run. A callback's further methods have names that resemble no moment's and take none, or are private.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

from paddle_dp.errors import UsageError, near
from paddle_dp.train.callback import Callback
from paddle_dp.units import Every

# The methods that a trainer calls, with their arguments; for a moment those whose first one it is.
_CALLS = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(Callback).items()
    if isinstance(method, FunctionType)
}
MOMENTS = {name: arguments for name, arguments in _CALLS.items() if arguments[0] == "moment"}

# Words in the names of other trainers' moments, and the moment here.
_ALIASES = {
    "begin": "start", "load": "start", "batch": "step", "iter": "step", "iteration": "step", "eval": "evaluated",
    "validate": "evaluated", "validation": "evaluated", "test": "evaluated", "predict": "evaluated",
    "checkpoint": "saved", "exception": "failed",
}  # fmt: skip


def refuse_overrides(callback: Any) -> None:
    """Raises UsageError for an object that is no Callback, for a method whose name resembles a moment's, for a moment's
    method that does not take the moment's arguments, and for settings of another type.
    """
    kind = type(callback)
    label = f"callback {kind.__module__}.{kind.__qualname__}"
    if not isinstance(callback, Callback):
        raise UsageError(
            f"{label} is not a paddle_dp.Callback. Derive it from that and override {_listed(MOMENTS)}; each is called "
            "with a moment (docs/add-a-part.md)."
        )
    for name in _CALLS:
        _check_call(getattr(callback, name), name, label)
    called = [_function(getattr(callback, name)) for name in _CALLS]
    for name in sorted({*dir(kind), *vars(callback)} - {*dir(Callback), *vars(Callback)}):
        method = None if name.startswith("_") else getattr(callback, name, None)
        if callable(method) and not any(_function(method) is function for function in called):  # an alias
            _check_name(method, name, label)
    every: Any = callback.every
    reads: Any = callback.reads  # "false" would count as true
    if every is not None and not isinstance(every, Every):
        text = every if isinstance(every, str) else Every.example
        raise UsageError(f"{label}: every is {every!r}: write Every.parse({text!r}).")
    if not isinstance(reads, bool):
        raise UsageError(f"{label}: reads is {reads!r}: write True, if step needs moment.numbers, or False.")


def _check_name(method: Any, name: str, label: str) -> None:
    """Refuses other trainers' names (`on_epoch_ended`, `train_batch_end`), a near miss (`epochs`) that has an argument
    for the moment, and any name whose first argument is a moment (`finish(self, moment)`).
    """
    first, *tokens = name.split("_")
    if first in ("on", "before", "after"):
        names = ["_".join(tokens), *tokens]
    elif tokens and tokens[-1] in ("begin", "start", "end"):
        names = [first, *tokens[:-1]]
    else:
        names = [] if _takes(method, 0) else [name]
    aliases = {} if names == [name] else _ALIASES
    meant = next(filter(None, (near(each, MOMENTS) or aliases.get(each) for each in names)), "")
    if not meant and first != "on" and not _takes_moment(method):
        return
    hint = f" Did you mean {_written(meant)}?" if meant else ""
    if meant in ("epoch", "step") and not {"before", "begin", "start"}.isdisjoint([first, *tokens]):
        hint += f" It is called after the {'update' if meant == 'step' else 'epoch'}; none is called before."
    raise UsageError(
        f"{label}: its method {name} is never called.{hint} The trainer calls {_listed(MOMENTS)} "
        f"(docs/add-a-part.md). If you call {name} yourself, rename it to _{name}."
    )


def _takes_moment(method: Any) -> bool:
    """True if the first argument has the name or the type of a moment: the method is written for the trainer."""
    try:
        first = next(iter(inspect.signature(method).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    kind = "" if first is None else inspect.formatannotation(first.annotation).strip("'\"").rpartition(".")[2]
    return first is not None and (first.name == "moment" or kind == "Moment")


# Functions whose call runs nothing until the result is awaited or iterated.
_LAZY = {
    inspect.iscoroutinefunction: "async",
    inspect.isasyncgenfunction: "an async generator",
    inspect.isgeneratorfunction: "a generator",
}


def _check_call(method: Any, name: str, label: str) -> None:
    names = _CALLS[name]
    hint = (
        ": the step is moment.progress.step, the numbers are moment.numbers" if names == ("moment",) else ""
    )
    if not _takes(method, len(names)):
        signature = inspect.signature(method) if callable(method) else f" = {method!r}"
        raise UsageError(
            f"{label}: {name}{signature} cannot be called with {len(names)} argument{'s' * (len(names) > 1)}. "
            f"Write def {_written(name)}{hint}."
        )
    function = _function(method)
    for called in (function, type(function).__call__):  # an object may be callable by its __call__
        if kind := next((kind for is_such, kind in _LAZY.items() if is_such(called)), None):
            raise UsageError(f"{label}: {name} is {kind}: called, it would do nothing. Write a plain method.")


def is_overridden(callback: Callback, name: str) -> bool:
    """True if the callback's class overrides the method, or a function was assigned to the object."""
    return _unbound(getattr(callback, name)) is not vars(Callback)[name]


def _unbound(method: Any) -> Any:
    """The function of a bound, class or static method; anything else unchanged."""
    return method.__func__ if isinstance(method, (MethodType, classmethod, staticmethod)) else method


def _function(method: Any) -> Any:
    return inspect.unwrap(_unbound(method))


def _takes(method: Any, number: int) -> bool:
    """True if it can be called with `number` arguments, or Python knows no signature."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return callable(method)
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True


def _written(name: str) -> str:
    return f"{name}({', '.join(['self', *_CALLS[name]])})"


def _listed(items: Iterable[str]) -> str:
    names = list(items)
    return ", ".join(names[:-1]) + f" and {names[-1]}"
