"""Matches the tensors of a source with a model's and prints the table of the match."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_dp.checkpoint.other_names import Translated, names_of, translated
from paddle_dp.checkpoint.source import Opened, check_patterns, fits
from paddle_dp.errors import UsageError
from paddle_dp.recipe import Load
from paddle_dp.text import and_more

if TYPE_CHECKING:
    from paddle import nn

_SHOWN = 6  # names in a row of the table
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Match:
    """Names of tensors by their fate: `loaded`, `other` (shapes differ), `left_over` (only in the source), `initial`
    (only in the model)."""

    loaded: tuple[str, ...]
    other: tuple[str, ...]
    left_over: tuple[str, ...]
    initial: tuple[str, ...]


def match(there: Shapes, here: Shapes, settings: Load, called: Callable[[str], str] = str) -> Match:
    """Matches a source's shapes (`there`) with a model's (`here`). `called` maps a model's name to the source's.

    Only tensors that `settings.only` selects count. Raises UsageError for a pattern that matches nothing, if less than
    half of the selected numbers fit, and, unless `settings.strict` is false, if a selected tensor is missing, left over
    or of another shape.
    """
    check_patterns(settings.only, there, f"in {settings.path}")
    check_patterns(settings.only, here, "in this model")
    selected = {
        name for name in (*there, *here) if not settings.only or any(fits(name, p) for p in settings.only)
    }
    common = sorted(selected & there.keys() & here.keys())
    matched = Match(
        loaded=tuple(name for name in common if there[name] == here[name]),
        other=tuple(name for name in common if there[name] != here[name]),
        left_over=tuple(sorted(selected & there.keys() - here.keys())),
        initial=tuple(sorted(selected & here.keys() - there.keys())),
    )
    _refuse(matched, there, here, settings, called)
    return matched


def _refuse(
    matched: Match, there: Shapes, here: Shapes, settings: Load, called: Callable[[str], str]
) -> None:
    wrong = [
        *(
            f"{_named(name, called)} is {list(there[name])} there and {list(here[name])} here"
            for name in matched.other
        ),
        *(f"{name} is only there" for name in matched.left_over),
        *(f"{name} is only in this model" for name in matched.initial),
    ]
    if wrong and settings.strict:
        raise UsageError(
            f"load.path {settings.path}: {_first(wrong, '; ')}. Name the tensors to load with load.only, or set "
            "load.strict=false to load those that fit."
        )
    meant = _numbers((*matched.loaded, *matched.other, *matched.initial), here)
    fits = _numbers(matched.loaded, here)
    if not matched.loaded or 2 * fits < meant:
        raise UsageError(
            f"load.path {settings.path}: only {fits} of the {meant} numbers that are meant fit this model "
            f"({_first(wrong, '; ')}). If that is right, name those with load.only."
        )


def _named(name: str, called: Callable[[str], str]) -> str:
    """ "blocks.1.out.weight, there h.0.attn.c_proj.weight,"."""
    return name if called(name) == name else f"{name}, there {called(name)},"


def outlook(source: Opened, model: nn.Layer, settings: Load) -> list[str]:
    """The table of the tensors that would be loaded into a model, which may be on the meta device. Raises as `match`
    does."""
    weights, convention = translated(source, names_of(model), settings.rename, settings.only)
    here = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    there = {name: weights.shape(name) for name in weights.names}
    return table(match(there, here, settings, weights.called), there, here, settings, weights, convention)


def table(
    matched: Match, there: Shapes, here: Shapes, settings: Load, weights: Translated, convention: str
) -> list[str]:
    """The table's lines for the screen. `convention`: the source's naming convention, or ""."""
    only = f", only {', '.join(settings.only)}" if settings.only else ""
    reshaped = [f"{name} ({list(there[name])} there, {list(here[name])} here)" for name in matched.other]
    rows = [
        ("loaded", matched.loaded, _numbers(matched.loaded, here)),
        ("of another shape, left initial", reshaped, _numbers(matched.other, here)),
        ("only there, left over", matched.left_over, _numbers(matched.left_over, there)),
        ("only here, left initial", matched.initial, _numbers(matched.initial, here)),
    ]
    under = f", with {convention} names" if convention else ""
    if weights.passed_over:
        rows.append(("only there, of no use here", weights.passed_over, 0))
    lines = [f"weights from {weights.folder}{under}{only}:"]
    for label, names, numbers in rows:
        count = f"{numbers:>13,} numbers" if numbers else " " * 21
        lines += [f"  {label:<30} {len(names):>5} tensors {count}  {_first(names, ', ')}"] if names else []
    return lines


def _numbers(names: Iterable[str], shapes: Shapes) -> int:
    return sum(math.prod(shapes[name]) for name in names)


def _first(items: Iterable[str], between: str) -> str:
    items = list(items)
    return between.join(items[:_SHOWN]) + and_more(items, _SHOWN, between + "and {} more")
