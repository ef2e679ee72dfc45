"""Putting a fault into the package for a while: names replaced, and put back."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Any

# Where faults are put in: the parts of a learner, and their methods.
LEARNER = "paddle_dp.learner.learner:Learner"
UPDATE = f"{LEARNER}.update"
FACTOR = "paddle_dp.learner.runner:BatchRunner._factor"
COUNT = "paddle_dp.learner.update:Counter.final_count"
NORMS = "paddle_dp.learner.update:PlacedNorm.norms_over"
CLIP = "paddle_dp.learner.update:PlacedNorm.clip"
STATISTICS = "paddle_dp.core.batch_norm:RunningStatistics.sync"
PUSHED = "paddle_dp.exchange.pushed_gradients:PushedGradients"
AXES = "paddle_dp.axes.axes_exchange:AxesExchange"
OWNERS = "paddle_dp.axes.axes_exchange:OwnerWeights"

Make = Callable[[Any], Any]  # returns what replaces a name, from what stands there


def rank() -> int:
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def ranks() -> int:
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def last() -> bool:
    """Whether this is the last rank of several: the one that a fault of one rank is put into."""
    return ranks() > 1 and rank() == ranks() - 1


def around(replacement: Callable[..., Any]) -> Make:
    """Makes functions that call `replacement` with the original function before their arguments."""

    def make(original: Any) -> Any:
        _refuse_fewer_arguments(original, replacement)
        return lambda *arguments, **named: replacement(original, *arguments, **named)

    return make


def _refuse_fewer_arguments(original: Any, replacement: Callable[..., Any]) -> None:
    """Raises TypeError if the package may call the original with arguments that the replacement does not take: it has
    changed, and the fault has to follow it."""
    taken = inspect.signature(replacement).parameters.values()
    positional = [each for each in taken if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    given = [
        each for each in inspect.signature(original).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if len(positional) - 1 < len(given) and not any(each.kind == each.VAR_POSITIONAL for each in taken):
        names = [each.name for each in given]
        raise TypeError(f"{original.__qualname__} takes {names}, and the fault {replacement.__name__} fewer")


def _backward_alone(exchange: str) -> tuple[str, Make]:
    """Sends no gradient while backward runs, so that all of them come to `finish`."""
    return f"{exchange}.backward", lambda backward: lambda self, last, counted=0: nullcontext()


NOTHING_PUSHED = _backward_alone(PUSHED)
NOTHING_OVERLAPPED = _backward_alone(AXES)  # the exchange of a hybrid layout


@contextmanager
def replaced(place: str, make: Make) -> Iterator[None]:
    """Replaces what stands at `place` ("package.module:Class.method") by `make(what stands there)`, for a while.

    Raises AttributeError when there is nothing: the package has changed, and the fault has to follow it.
    """
    module, _, path = place.partition(":")
    owner: Any = import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = inspect.getattr_static(owner, name)
    inherited = inspect.isclass(owner) and name not in vars(owner)
    made = make(getattr(owner, name))
    setattr(owner, name, staticmethod(made) if isinstance(original, staticmethod) else made)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
