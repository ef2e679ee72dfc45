"""The keywords of Trainer.of, read as strictly as a recipe's keys, and those of before 0.1.0 answered with today's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from paddle_dp.errors import UsageError
from paddle_dp.part import Owner, read_settings
from paddle_dp.recipe import Precision, Train

P = ParamSpec("P")
T = TypeVar("T")
OWNER = Owner(subject="Trainer.of", prefix="Trainer.of")
RENAMED = {
    "micros": "micro_batches",
    "last": "drop_last, True or False",
    "out": "folder",
    "attends": "attention_methods",
}


def todays_names(function: Callable[P, T]) -> Callable[P, T]:
    """`function`, which answers a keyword of before 0.1.0 by a UsageError with today's."""

    @wraps(function)
    def called(*given: P.args, **named: P.kwargs) -> T:
        if old := [name for name in named if name in RENAMED]:
            raise UsageError("\n".join(f"Trainer.of: {name}= is now {RENAMED[name]}." for name in old))
        return function(*given, **named)

    return called


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run lives, and how it goes on there."""

    folder: str
    resume: bool | str = False
    accept: tuple[str, ...] | str = ()

    @property
    def accepted(self) -> Sequence[str]:
        return [self.accept] if isinstance(self.accept, str) else self.accept


def read_train(precision: Precision, **settings: Any) -> Train:
    """A recipe's `train`, of settings given in Python. Raises RecipeError with every mistake."""
    return replace(read_settings(Train, _plain(settings), OWNER), precision=precision)


def read_place(**settings: Any) -> Place:
    """Raises RecipeError with every mistake."""
    return read_settings(Place, _plain(settings), OWNER)


def check_collections(lists: Mapping[str, Any], mappings: Mapping[str, Any]) -> None:
    """Raises UsageError for one thing where a list of them is meant, and for what is no mapping."""
    for name, given in lists.items():
        if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
            raise UsageError(f"Trainer.of.{name}: {given!r} is not a list: write {name}=[…].")
    for name, given in mappings.items():
        if not isinstance(given, Mapping):
            raise UsageError(f"Trainer.of.{name}: {given!r} is not a mapping: write {name}={{…}}.")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """NumPy's numbers as Python's."""
    return {
        name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()
    }
