"""Which tensors of a source are loaded into a model, which are left, and the table that says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_dp.checkpoint.other_names import names_of, translated
from paddle_dp.checkpoint.source import Opened, check_patterns, fits
from paddle_dp.checkpoint.translated import Translated
from paddle_dp.errors import UsageError
from paddle_dp.recipe import Load

if TYPE_CHECKING:
    from paddle import nn

_SHOWN = 6  # names in a row of the table
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Match:
    """Names of tensors: those that are loaded, those that are `other` in shape there and here, those of the source that
    are `left_over`, and those of the model that stay `initial`."""

    loaded: tuple[str, ...]
    other: tuple[str, ...]
    left_over: tuple[str, ...]
    initial: tuple[str, ...]


def match(there: Shapes, here: Shapes, wanted: Load, called: Callable[[str], str] = str) -> Match:
    """Which tensors of a source are loaded into a model. `called`: what one of the model is called in the source.

    Raises UsageError for a pattern that matches nothing, when nothing or less than half of what is meant fits, and,
    unless `wanted.strict` is false, when anything that is meant is missing, left over or of another shape.
    """
    check_patterns(wanted.only, there, f"in {wanted.path}")
    check_patterns(wanted.only, here, "in this model")
    asked = {name for name in (*there, *here) if not wanted.only or any(fits(name, p) for p in wanted.only)}
    common = sorted(asked & there.keys() & here.keys())
    found = Match(
        loaded=tuple(name for name in common if there[name] == here[name]),
        other=tuple(name for name in common if there[name] != here[name]),
        left_over=tuple(sorted(asked & there.keys() - here.keys())),
        initial=tuple(sorted(asked & here.keys() - there.keys())),
    )
    _refuse(found, there, here, wanted, called)
    return found


def _refuse(found: Match, there: Shapes, here: Shapes, wanted: Load, called: Callable[[str], str]) -> None:
    wrong = [
        *(
            f"{_named(name, called)} is {list(there[name])} there and {list(here[name])} here"
            for name in found.other
        ),
        *(f"{name} is only there" for name in found.left_over),
        *(f"{name} is only in this model" for name in found.initial),
    ]
    if wrong and wanted.strict:
        raise UsageError(
            f"load.path {wanted.path}: {_first(wrong, '; ')}. Name what is meant with load.only, or set "
            "load.strict=false to load what fits."
        )
    meant = sum(math.prod(here[name]) for name in (*found.loaded, *found.other, *found.initial))
    fits = sum(math.prod(here[name]) for name in found.loaded)
    if not found.loaded or 2 * fits < meant:
        raise UsageError(
            f"load.path {wanted.path}: only {fits} of the {meant} numbers that are meant fit this model "
            f"({_first(wrong, '; ')}). If that is right, name those with load.only."
        )


def _named(name: str, called: Callable[[str], str]) -> str:
    """«blocks.1.out.weight, there h.0.attn.c_proj.weight,»."""
    return name if called(name) == name else f"{name}, there {called(name)},"


def outlook(source: Opened, model: nn.Layer, wanted: Load) -> list[str]:
    """The table of what would be loaded into a model, which may be built without memory. Raises as `match` does."""
    weights, whose = translated(source, names_of(model), wanted.rename)
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    there = {name: weights.shape(name) for name in weights.names}
    return table(match(there, here, wanted, weights.called), there, here, wanted, weights, whose)


def table(
    found: Match, there: Shapes, here: Shapes, wanted: Load, weights: Translated, whose: str
) -> list[str]:
    """The lines on the screen. `whose`: whose names the source has."""
    only = f", only {', '.join(wanted.only)}" if wanted.only else ""
    others = [f"{name} ({list(there[name])} there, {list(here[name])} here)" for name in found.other]
    rows = [
        ("loaded", found.loaded, sum(math.prod(here[name]) for name in found.loaded)),
        ("of another shape, left initial", others, sum(math.prod(here[name]) for name in found.other)),
        ("only there, left over", found.left_over, sum(math.prod(there[name]) for name in found.left_over)),
        ("only here, left initial", found.initial, sum(math.prod(here[name]) for name in found.initial)),
    ]
    under = f", with {whose} names" if whose else ""
    if weights.passed_over:
        rows.append(("only there, of no use here", weights.passed_over, 0))
    return [
        f"weights from {weights.folder}{under}{only}:",
        *(
            f"  {what:<30} {len(names):>5} tensors {numbers:>13,} numbers  {_first(names, ', ')}".replace(
                f"{0:>13,} numbers", " " * 21
            )
            for what, names, numbers in rows
            if names
        ),
    ]


def _first(words: Sequence[str] | Iterable[str], between: str) -> str:
    words = list(words)
    more = f"{between}and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return between.join(words[:_SHOWN]) + more
