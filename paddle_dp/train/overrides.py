"""Refuses, before training, a callback with a method that looks like a moment's and that the trainer would never call.

Keras, Lightning and Paddle's `Model.fit` call `on_epoch_end(epoch, logs)`; a callback written for them would be
accepted and never run. A callback's further methods are private, or take no moment.
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

# A moment, its names in other tools or in plain English, and further words in such names; the first row decides.
_OTHER_NAMES = (
    ("failed", "exception error failure crashed", "fail interrupt crash"),
    ("start", "loaded", "load"),
    ("saved", "saving checkpoint checkpointed", "save"),
    ("evaluated", "evaluating validate validated validation", "eval evaluation val test predict"),
    ("epoch", "every_epoch each_epoch", "epoch"),
    ("step", "batch iter iterate iteration update updated every_step each_step log logged logging", "step backward"),
    ("start", "begin begun beginning started setup set_up", "start before"),
    ("end", "finish finished done close closed stop stopped teardown tear_down", "end"),
)  # fmt: skip
_UNITS = {
    "train", "training", "run", "fit", "epoch", "step", "batch", "iter", "iteration", "update", "evaluation", "eval",
    "val", "validation", "validate", "test", "backward", "checkpoint",
}  # fmt: skip


def refuse_overrides(callback: Any) -> None:
    """Raises UsageError for an object that is no Callback, for a method that looks like a moment's and would never be
    called, for a moment's method that does not take the moment's arguments, and for settings of another type.
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
    """Refuses `on_epoch_end` and its like; also `evaluate`, `finish` and others that may be written for a moment."""
    signature, hint, after = _signature(method), "", ""
    first = next(iter(signature.parameters.values()), None) if signature else None
    for_moment = first is not None and (first.name == "moment" or _type_of(first) == "Moment")
    by_name = {other: moment for moment, names, _ in _OTHER_NAMES for other in names.split()}
    if is_foreign := _is_foreign(name):
        hint = _meant(name)
        if hint in ("epoch", "step") and any(token in name for token in ("begin", "start", "before")):
            after = (
                f" (it is called after the {'update' if hint == 'step' else 'epoch'}; none is called before)"
            )
    elif for_moment or _takes_anything(method, first):
        hint = by_name.get(name) or near(name, MOMENTS) or ""
    if not (hint or for_moment):
        return
    meant = f" Did you mean {_written(hint)}{after}?" if hint else ""
    calls = f" The trainer calls {_listed(MOMENTS)} (docs/add-a-part.md)." if is_foreign or not hint else ""
    raise UsageError(
        f"{label}: its method {name} is never called.{meant}{calls} If you call it yourself, rename it to _{name}."
    )


def _is_foreign(name: str) -> bool:
    """True for a name that other trainers' callbacks have: `on_train_end`, `epoch_end`, `after_train_iter`."""
    affixed = name.startswith(("before_", "after_")) or name.endswith(("_begin", "_start", "_end"))
    return name.startswith("on_") or (affixed and not _UNITS.isdisjoint(name.split("_")))


def _meant(name: str) -> str:
    """The moment that a foreign name probably means."""
    tokens = {*name.split("_")}
    return next((row[0] for row in _OTHER_NAMES if tokens & {*row[1].split(), *row[2].split()}), "end")


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


def _takes_anything(method: Any, first: inspect.Parameter | None) -> bool:
    """True if it needs one argument, of no declared type, or begins with a trainer."""
    if first is None or first.name == "trainer":
        return first is not None
    return _takes(method, 1) and not _takes(method, 0) and _type_of(first) in ("", "Any")


def _type_of(parameter: inspect.Parameter) -> str:
    """The last word of a parameter's annotation; "" without one."""
    if parameter.annotation is parameter.empty:
        return ""
    return inspect.formatannotation(parameter.annotation).strip("'\"").rpartition(".")[2]


def _signature(method: Any) -> inspect.Signature | None:
    """The arguments without self; None if Python knows none."""
    try:
        return inspect.signature(method)
    except (TypeError, ValueError):
        return None


def _unbound(method: Any) -> Any:
    """The function of a bound, class or static method; anything else unchanged."""
    return method.__func__ if isinstance(method, (MethodType, classmethod, staticmethod)) else method


def _function(method: Any) -> Any:
    return inspect.unwrap(_unbound(method))


def _takes(method: Any, number: int) -> bool:
    """True if it can be called with `number` arguments, or Python knows no signature."""
    if not callable(method) or (signature := _signature(method)) is None:
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
