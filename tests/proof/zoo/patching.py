"""Putting a fault into the package for a while: one name replaced, and put back."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any

# Where faults are put in: the parts of a learner, and their methods.
LEARNER = "paddle_dp.learner.learner:Learner"
UPDATE = f"{LEARNER}.update"
FACTOR = "paddle_dp.learner.runner:BatchRunner._factor"
COUNT = "paddle_dp.learner.weights:Counter.total"
NORMS = "paddle_dp.learner.weights:PlacedNorm.norms_over"
CLIP = "paddle_dp.learner.weights:PlacedNorm.clip"
STATISTICS = "paddle_dp.core.batch_norm:RunningStatistics.sync"
PUSHED = "paddle_dp.exchange.pushed_gradients:PushedGradients"
AXES = "paddle_dp.axes.axes_exchange:AxesExchange"
OWNERS = "paddle_dp.axes.axes_exchange:OwnerWeights"


def rank() -> int:
    return int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def ranks() -> int:
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def last() -> bool:
    """Whether this is the last rank of several: the one that a fault of one rank is put into."""
    return ranks() > 1 and rank() == ranks() - 1


@contextmanager
def replaced(place: str, make: Callable[[Any], Any]) -> Iterator[None]:
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


@contextmanager
def all_of(*patches: Any) -> Iterator[None]:
    """Several patches together."""
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def before_the_exchange(make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Replaces the exchange of a hybrid layout, to which all gradients come whole: none is sent while backward runs."""
    nothing_overlapped = replaced(f"{AXES}.backward", lambda _: lambda self, last, counted=0: nullcontext())
    return all_of(nothing_overlapped, replaced(f"{AXES}.finish", make))
