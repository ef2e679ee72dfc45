"""Mistakes in a model's settings, each with its field's name, before anything is built."""

from __future__ import annotations

from typing import Any


def at_least_one(config: Any, *names: str) -> None:
    """Raises ValueError unless each of these is 1 or more."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name}: {getattr(config, name)} is less than 1")


def divides(config: Any, part: str, whole: str) -> None:
    """Raises ValueError unless `part` divides `whole`."""
    if getattr(config, whole) % getattr(config, part):
        raise ValueError(f"{part}: {getattr(config, part)} does not divide {whole} {getattr(config, whole)}")


def below_one(config: Any, name: str) -> None:
    """Raises ValueError unless a share of what is dropped leaves something."""
    if not 0 <= getattr(config, name) < 1:
        raise ValueError(f"{name}: {getattr(config, name)} is not from 0 to below 1")


def widths(config: Any, name: str) -> None:
    """Raises ValueError unless all of several widths are 1 or more."""
    if any(width < 1 for width in getattr(config, name)):
        raise ValueError(f"{name}: widths are 1 or more, not {list(getattr(config, name))}")
