"""Checks the keywords of Trainer.of as strictly as a recipe's keys, and reports the new name of an old keyword."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np

from paddle_dp.errors import UsageError
from paddle_dp.part import ErrorContext, read_settings
from paddle_dp.recipe import Precision, Train

P = ParamSpec("P")
T = TypeVar("T")
OWNER = ErrorContext(subject="Trainer.of", prefix="Trainer.of")
RENAMED = {
    "micros": "micro_batches",
    "last": "drop_last, True or False",
    "out": "folder",
    "attends": "attention_methods",
}


def refuse_old_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: a keyword from before 0.1.0 raises a UsageError with its new name."""

    @wraps(function)
    def called(*arguments: P.args, **named: P.kwargs) -> T:
        if old := [name for name in named if name in RENAMED]:
            raise UsageError("\n".join(f"Trainer.of: {name}= is now {RENAMED[name]}." for name in old))
        return function(*arguments, **named)

    return called


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """A run's folder, and the checkpoint to resume in it."""

    folder: str
    resume: bool | str = False
    accept: tuple[str, ...] | str = ()

    @property
    def accepted(self) -> Sequence[str]:
        return [self.accept] if isinstance(self.accept, str) else self.accept


def read_train(precision: Precision, **settings: Any) -> Train:
    """A recipe's `train`, from settings given in Python. Raises RecipeError with every mistake."""
    return replace(read_settings(Train, _plain(settings), OWNER), precision=precision)


def read_resume_options(**settings: Any) -> ResumeOptions:
    """ResumeOptions from settings given in Python. Raises RecipeError with every mistake."""
    return read_settings(ResumeOptions, _plain(settings), OWNER)


def check_collections(lists: Mapping[str, Any], mappings: Mapping[str, Any]) -> None:
    """Raises UsageError for a value of `lists` that is no list, and for one of `mappings` that is no mapping."""
    for name, value in lists.items():
        if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
            raise UsageError(f"Trainer.of.{name}: {value!r} is not a list: write {name}=[…].")
    for name, value in mappings.items():
        if not isinstance(value, Mapping):
            raise UsageError(f"Trainer.of.{name}: {value!r} is not a mapping: write {name}={{…}}.")


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with NumPy numbers as Python numbers."""
    return {
        name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()
    }
