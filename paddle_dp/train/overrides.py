"""Whether a callback's methods are ones that a trainer calls: what it would never call is refused before training.

Keras, Lightning and Paddle's own `Model.fit` call `on_epoch_end(epoch, logs)`; a callback written that way would be
accepted and would never run.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
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

_UNIT = "train|training|run|fit|epoch|step|batch|iter|iteration|update|evaluation|eval|val|validation|test"
_OTHERS = re.compile(
    rf"on_.+|((train|training)_)?({_UNIT})_(begin|start|end)|(before|after)_(train_|val_|test_)?({_UNIT})"
)
# The first whose pattern is found in a name says which moment is meant.
_MEANT = (
    ("exception|error|fail|interrupt", "failed"),
    ("load", "start"),
    ("save|checkpoint", "saved"),
    ("eval|val|test|predict", "evaluated"),
    ("epoch", "epoch"),
    ("batch|step|iter|update", "step"),
    ("begin|start|before|setup", "start"),
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
    if callback.every is not None and not isinstance(callback.every, Every):
        raise UsageError(f"{where}: every is {callback.every!r}: write Every.parse({str(callback.every)!r}).")


def _check_name(callback: Callback, name: str, where: str) -> None:
    """Refuses `on_epoch_end` and its like, and `evaluate(moment)` for `evaluated`."""
    if _OTHERS.fullmatch(name):
        meant = next(moment for pattern, moment in _MEANT if re.search(pattern, name))
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
    if (close := near(name, MOMENTS)) and _takes_moment(getattr(callback, name)):
        raise UsageError(
            f"{where}: nobody calls its method {name}. Did you mean {_written(close)}? If it is a method of its "
            f"own, call it _{name}."
        )


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
    function = inspect.unwrap(getattr(method, "__func__", method))
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        what = "a generator" if inspect.isgeneratorfunction(function) else "async"
        raise UsageError(f"{where}: {name} is {what}: called, it would do nothing. Write a plain method.")


def is_overridden(callback: Callback, name: str) -> bool:
    """Whether a method does anything: of the callback's class, or a function that was given to the object."""
    return getattr(getattr(callback, name), "__func__", None) is not getattr(Callback, name)


def _takes_moment(method: Any) -> bool:
    """Whether it looks as if it was written for a moment: it takes one argument, or its first is called so."""
    if _takes(method, 1):
        return True
    return next(iter(inspect.signature(method).parameters), None) == "moment"


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
