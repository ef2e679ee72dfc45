"""Refuses, before training, a callback with a method that looks like a moment's and that the trainer would never call.

Keras, Lightning and Paddle's `Model.fit` call `on_epoch_end(epoch, logs)`; a callback written for them would be
accepted and never run. A callback may have further methods that its other methods name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from paddle_dp.errors import UsageError, near
from paddle_dp.train.callback import Callback
from paddle_dp.units import Every

# The methods of a Callback that a trainer calls for a moment, and their arguments.
MOMENTS = {
    "refuse": ("moment",),
    "start": ("moment",),
    "step": ("moment",),
    "epoch": ("moment",),
    "rewinding": ("moment",),
    "refused": ("moment", "refusal"),
    "measured": ("moment", "measured"),
    "evaluated": ("moment", "evaluation"),
    "saved": ("moment", "path"),
    "save_failed": ("moment", "error"),
    "interrupted": ("moment",),
    "end": ("moment",),
    "failed": ("moment", "error"),
}
_CALLS = {**MOMENTS, "due_at_step": ("step",), "due_at_epoch": ("epochs",)}

_UNIT = (
    "train|training|run|fit|epoch|step|batch|iter|iteration|update|evaluation|eval|val|validation|validate|test|"
    "backward|optimizer_step|zero_grad|save_checkpoint|load_checkpoint"
)
# Methods of other trainers' callbacks.
_FOREIGN = re.compile(
    rf"on_.+|((train|training)_)?({_UNIT})_(begin|start|end)|(before|after)_(train_|val_|test_)?({_UNIT})"
)
# The bare words for a moment in Lightning, TensorFlow's hooks, Accelerate's trackers, or plain English.
_MOMENT_LIKE = re.compile(
    "begin|begun|beginning|started|set_?up|tear_?down|finish|finished|done|closed?|stop|stopped|"
    "iteration|iter|iterate|batch|updated?|(every|each)_(step|epoch)|log|logged|logging|"
    "saving|checkpoint|checkpointed|loaded|evaluating|validated?|validation|exception|error|failure|crashed|interrupted"
)
# The moment that a name probably means: the first pattern found in it decides.
_MEANT = (
    ("exception|error|fail|interrupt|crash", "failed"),
    ("load", "start"),
    ("save|saving|checkpoint", "saved"),
    ("eval|val|test|predict", "evaluated"),
    ("epoch", "epoch"),
    ("batch|step|iter|update|^log|backward|zero_grad", "step"),
    ("begin|begun|start|before|set_?up", "start"),
    ("", "end"),
)


def refuse_overrides(callback: Any) -> None:
    """Raises UsageError for an object that is no Callback, for a method that looks like a moment's and would never be
    called, and for a moment's method that does not take the moment's arguments.
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
    for name in sorted({*dir(kind), *vars(callback)} - {*dir(Callback), *vars(Callback)}):
        if not name.startswith("_") and callable(method := getattr(callback, name, None)):
            _check_name(callback, method, name, label)
    _check_settings(callback, label)


def _check_settings(callback: Callback, label: str) -> None:
    """Refuses an `every` that is no Every, and a `reads` that is no bool: "false" would count as true."""
    every: Any = callback.every
    reads: Any = callback.reads
    if every is not None and not isinstance(every, Every):
        words = every if isinstance(every, str) else Every.example
        raise UsageError(f"{label}: every is {every!r}: write Every.parse({words!r}).")
    if not isinstance(reads, bool):
        raise UsageError(f"{label}: reads is {reads!r}: write True, if step needs moment.numbers, or False.")


def _check_name(callback: Callback, method: Any, name: str, label: str) -> None:
    """Refuses `on_epoch_end` and its like; also `evaluate`, `finish` and other names that look written for a moment,
    unless another method of the callback names them.
    """
    if _FOREIGN.fullmatch(name):
        meant = _meant(name)
        late = meant in ("epoch", "step") and re.search("begin|start|before", name)
        after = (
            f" (it is called after the {'update' if meant == 'step' else 'epoch'}; none is called before)"
            if late
            else ""
        )
        raise UsageError(
            f"{label}: its method {name} is never called. Did you mean {_written(meant)}{after}? The moments are "
            f"{_listed(MOMENTS)} (docs/add-a-part.md). If you call it yourself, rename it, such as to _{name}."
        )
    if _is_named(callback, method, name):
        return
    close = near(name, MOMENTS) if _takes_moment(method) else None
    if likely := _meant(name) if _MOMENT_LIKE.fullmatch(name) and _may_be_for_moment(method) else close:
        raise UsageError(
            f"{label}: its method {name} is never called. Did you mean {_written(likely)}? If you call it yourself, "
            f"rename it to _{name}."
        )
    if _is_for_moment(method):
        raise UsageError(
            f"{label}: its method {name} is never called. The trainer calls {_listed(MOMENTS)} (docs/add-a-part.md). "
            f"If you call it yourself, rename it to _{name}."
        )


def _meant(name: str) -> str:
    return next(moment for pattern, moment in _MEANT if re.search(pattern, name))


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
        if what := next((what for is_such, what in _LAZY.items() if is_such(called)), None):
            raise UsageError(f"{label}: {name} is {what}: called, it would do nothing. Write a plain method.")


def is_overridden(callback: Callback, name: str) -> bool:
    """True if the callback's class overrides the method, or a function was assigned to the object."""
    return _unbound(getattr(callback, name)) is not vars(Callback)[name]


def _takes_moment(method: Any) -> bool:
    """True if it takes one argument, or its first is a moment by name or type."""
    return _takes(method, 1) or _is_for_moment(method)


def _may_be_for_moment(method: Any) -> bool:
    """True if it may have been written for a moment, or for another tool's trainer: it needs one argument, of no other
    declared type.
    """
    first = _first(method)
    if first is None or _is_for_moment(method) or first.name == "trainer":
        return first is not None
    return _takes(method, 1) and not _takes(method, 0) and first.annotation in (first.empty, Any, "Any")


def _is_for_moment(method: Any) -> bool:
    """True if it was written for a moment: its first argument is named `moment`, or annotated as Moment."""
    first = _first(method)
    if first is None:
        return False
    annotation = inspect.formatannotation(first.annotation).strip("'\"")
    return first.name == "moment" or annotation.rpartition(".")[2] == "Moment"


def _first(method: Any) -> inspect.Parameter | None:
    """The first argument, without self; None if there is none, or Python knows no signature."""
    try:
        return next(iter(inspect.signature(method).parameters.values()), None)
    except (TypeError, ValueError):
        return None


def _is_named(callback: Callback, method: Any, name: str) -> bool:
    """True if another method of the callback names this one, and so may call it, or is an alias of it."""
    kinds = [kind for kind in type(callback).__mro__ if kind not in Callback.__mro__]
    members = [
        (word, value) for place in (*kinds, callback) for word, value in vars(place).items() if word != name
    ]
    function = _function(method)
    return any(
        other is function or (isinstance(other, FunctionType) and name in _names(other.__code__))
        for _, value in members
        for other in _functions(value)
    )


def _unbound(method: Any) -> Any:
    """The function of a bound, class or static method; anything else unchanged."""
    return method.__func__ if isinstance(method, (MethodType, classmethod, staticmethod)) else method


def _function(method: Any) -> Any:
    return inspect.unwrap(_unbound(method))


def _functions(value: Any) -> Iterator[Any]:
    """Yields the functions of a class attribute: a method, a property, a decorated method."""
    for function in (value.fget, value.fset) if isinstance(value, property) else (value,):
        if callable(function) or isinstance(function, (classmethod, staticmethod)):
            yield _function(function)


def _names(code: CodeType) -> Iterator[str]:
    """Yields the attributes that code names, also in functions within it, and its strings, since they may be looked up
    by name."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant


def _takes(method: Any, number: int) -> bool:
    """True if it can be called with `number` arguments, or Python knows no signature."""
    if not callable(method):
        return False
    try:
        inspect.signature(method).bind(*[None] * number)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


def _written(name: str) -> str:
    return f"{name}({', '.join(['self', *_CALLS[name]])})"


def _listed(items: Iterable[str]) -> str:
    names = list(items)
    return ", ".join(names[:-1]) + f" and {names[-1]}"
