"""Whether a callback's methods are ones that a trainer calls: what it would never call is refused before training.

Keras, Lightning and Paddle's own `Model.fit` call `on_epoch_end(epoch, logs)`; a callback written that way would be
accepted and would never run. Methods of its own a callback may have: what another of its methods names is one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from paddle_dp.errors import UsageError, near
from paddle_dp.train.callback import Callback
from paddle_dp.units import Every

# The methods of a Callback that a trainer calls for a moment, and with what.
MOMENTS = {
    "start": ("moment",),
    "step": ("moment",),
    "epoch": ("moment",),
    "evaluated": ("moment", "evaluation"),
    "saved": ("moment", "path"),
    "end": ("moment",),
    "failed": ("moment", "error"),
}
_CALLS = {**MOMENTS, "due_at_step": ("step",), "due_at_epoch": ("epochs",)}

_UNIT = (
    "train|training|run|fit|epoch|step|batch|iter|iteration|update|evaluation|eval|val|validation|validate|test|"
    "backward|optimizer_step|zero_grad|save_checkpoint|load_checkpoint"
)
_OTHERS = re.compile(
    rf"on_.+|((train|training)_)?({_UNIT})_(begin|start|end)|(before|after)_(train_|val_|test_)?({_UNIT})"
)
# The bare words for a moment in Lightning, TensorFlow's hooks, Accelerate's trackers, or plain English.
_WORDS = re.compile(
    "begin|begun|beginning|started|set_?up|tear_?down|finish|finished|done|closed?|stop|stopped|"
    "iteration|iter|iterate|batch|updated?|(every|each)_(step|epoch)|log|logged|logging|"
    "saving|checkpoint|checkpointed|loaded|evaluating|validated?|validation|exception|error|failure|crashed|interrupted"
)
# The first whose pattern is found in a name says which moment is meant.
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
    """Raises UsageError for what is no Callback, for a method that looks like a moment and would never be called, and
    for a moment that cannot be called with what it comes with.
    """
    kind = type(callback)
    where = f"callback {kind.__module__}.{kind.__qualname__}"
    if not isinstance(callback, Callback):
        raise UsageError(
            f"{where} is not a paddle_dp.Callback. Derive it from that and override {_listed(MOMENTS)}; each is called "
            "with a moment (docs/add-a-part.md)."
        )
    for name in _CALLS:
        _check_call(callback, name, where)
    for name in sorted({*dir(kind), *vars(callback)} - {*dir(Callback), *vars(Callback)}):
        if not name.startswith("_") and callable(getattr(callback, name, None)):
            _check_name(callback, name, where)
    _check_settings(callback, where)


def _check_settings(callback: Callback, where: str) -> None:
    """Refuses an `every` that is no interval, and a `reads` that is no truth value: "false" would be true."""
    every: Any = callback.every
    reads: Any = callback.reads
    if every is not None and not isinstance(every, Every):
        words = every if isinstance(every, str) else Every.example
        raise UsageError(f"{where}: every is {every!r}: write Every.parse({words!r}).")
    if not isinstance(reads, bool):
        raise UsageError(
            f"{where}: reads is {reads!r}: write True, where step wants moment.numbers, or False."
        )


def _check_name(callback: Callback, name: str, where: str) -> None:
    """Refuses `on_epoch_end` and its like; and `evaluate`, `finish` or anything else that was written for a moment,
    where no other method of the callback names it.
    """
    if _OTHERS.fullmatch(name):
        meant = _meant(name)
        late = meant in ("epoch", "step") and re.search("begin|start|before", name)
        after = (
            f" (it comes after the {'update' if meant == 'step' else 'epoch'}; none comes before)"
            if late
            else ""
        )
        raise UsageError(
            f"{where}: nobody calls its method {name}. Did you mean {_written(meant)}{after}? The moments are "
            f"{_listed(MOMENTS)} (docs/add-a-part.md). A method of its own needs another name, such as _{name}."
        )
    if _is_named(callback, name):
        return
    method = getattr(callback, name)
    close = near(name, MOMENTS) if _takes_moment(method) else None
    if likely := _meant(name) if _WORDS.fullmatch(name) and _may_be_for_moment(method) else close:
        raise UsageError(
            f"{where}: nobody calls its method {name}. Did you mean {_written(likely)}? If it is a method of its "
            f"own, call it _{name}."
        )
    if _is_for_moment(method):
        raise UsageError(
            f"{where}: nobody calls its method {name}. A moment is told to {_listed(MOMENTS)} (docs/add-a-part.md). "
            f"If it is a method of its own, call it _{name}."
        )


def _meant(name: str) -> str:
    return next(moment for pattern, moment in _MEANT if re.search(pattern, name))


# What does nothing until somebody waits for it or draws from it.
_LAZY = {
    inspect.iscoroutinefunction: "async",
    inspect.isasyncgenfunction: "an async generator",
    inspect.isgeneratorfunction: "a generator",
}


def _check_call(callback: Callback, name: str, where: str) -> None:
    method = getattr(callback, name)
    given = _CALLS[name]
    hint = (
        ": the step is moment.progress.step, the numbers are moment.numbers" if given == ("moment",) else ""
    )
    if not _takes(method, len(given)):
        signature = inspect.signature(method) if callable(method) else f" = {method!r}"
        raise UsageError(
            f"{where}: {name}{signature} cannot be called with {len(given)} argument{'s' * (len(given) > 1)}. "
            f"Write def {_written(name)}{hint}."
        )
    function = _function(method)
    for called in (function, type(function).__call__):  # an object may be called by a method
        if what := next((what for is_such, what in _LAZY.items() if is_such(called)), None):
            raise UsageError(f"{where}: {name} is {what}: called, it would do nothing. Write a plain method.")


def is_overridden(callback: Callback, name: str) -> bool:
    """Whether a method does anything: of the callback's class, or a function that was given to the object."""
    return getattr(getattr(callback, name), "__func__", None) is not getattr(Callback, name)


def _takes_moment(method: Any) -> bool:
    """Whether it looks as if it was written for a moment: it takes one argument, or its first is called so."""
    return _takes(method, 1) or _is_for_moment(method)


def _may_be_for_moment(method: Any) -> bool:
    """Whether it may have been written for a moment, or for another tool's trainer: it needs one argument, which is
    not said to be something else.
    """
    first = _first(method)
    if first is None or _is_for_moment(method) or first.name == "trainer":
        return first is not None
    return _takes(method, 1) and not _takes(method, 0) and first.annotation in (first.empty, Any, "Any")


def _is_for_moment(method: Any) -> bool:
    """Whether it was written for a moment: its first argument is called so, or said to be one."""
    first = _first(method)
    if first is None:
        return False
    said = (
        first.annotation if isinstance(first.annotation, str) else getattr(first.annotation, "__name__", "")
    )
    return first.name == "moment" or said.strip("'\"").rpartition(".")[2] == "Moment"


def _first(method: Any) -> inspect.Parameter | None:
    """The first argument that it is called with, as far as Python knows."""
    try:
        return next(iter(inspect.signature(method).parameters.values()), None)
    except (TypeError, ValueError):
        return None


def _is_named(callback: Callback, name: str) -> bool:
    """Whether another method of the callback names this one, and so may call it; or it is a method under two names."""
    kinds = [kind for kind in type(callback).__mro__ if kind not in Callback.__mro__]
    others = [
        (word, value) for place in (*kinds, callback) for word, value in vars(place).items() if word != name
    ]
    function = _function(getattr(callback, name))
    return any(
        found is function or name in _names(getattr(found, "__code__", None))
        for _, value in others
        for found in _functions(value)
    )


def _function(method: Any) -> Any:
    return inspect.unwrap(getattr(method, "__func__", method))


def _functions(value: Any) -> Iterator[Any]:
    """The functions behind what stands in a class: a method, a property's, a decorated one's."""
    for found in (value.fget, value.fset) if isinstance(value, property) else (value,):
        if callable(found) or hasattr(found, "__func__"):
            yield _function(found)


def _names(code: CodeType | None) -> Iterator[str]:
    """The attributes that a function's code names, in functions within it too, and its texts (for getattr)."""
    if code is None:
        return
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant


def _takes(method: Any, number: int) -> bool:
    """Whether it can be called with so many arguments. What has no signature that Python knows can."""
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


def _listed(given: Iterable[str]) -> str:
    names = list(given)
    return ", ".join(names[:-1]) + f" and {names[-1]}"
