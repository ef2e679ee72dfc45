"""Gives a new training the weights of an earlier one: which of them are meant, which fit, and a table of what was done.

Weights and buffers only: the optimizer, the progress and the order of samples begin anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_dp.checkpoint import fill
from paddle_dp.checkpoint.source import Source, check_patterns, fits, source
from paddle_dp.errors import CheckpointError, PaddleDPError, UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.parallel import Learner
from paddle_dp.recipe import Load

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


def match(there: Shapes, here: Shapes, wanted: Load) -> Match:
    """Which tensors of a source are loaded into a model.

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
    _refuse(found, there, here, wanted)
    return found


def _refuse(found: Match, there: Shapes, here: Shapes, wanted: Load) -> None:
    wrong = [
        *(f"{name} is {list(there[name])} there and {list(here[name])} here" for name in found.other),
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


def load_initial(wanted: Load, learner: Learner) -> list[str]:
    """Loads what `wanted` says into a placed model; each rank reads its own slices. Returns the table of what was done.

    Collective. Raises UsageError or CheckpointError, the same on every rank.
    """
    import paddle

    mesh, tensors = learner.mesh, learner.state()
    weights = _together(mesh, lambda: source(Path(wanted.path).expanduser()))
    own = {
        name: list(learner.placements.of(tensor).global_shape(tensor.shape))
        for name, tensor in tensors.items()
    }
    here = {name: tuple(shape) for shapes in mesh.gather(own) for name, shape in shapes.items()}
    there = {name: weights.shape(name) for name in weights.names}
    found = match(there, here, wanted)
    loaded = set(found.loaded)

    def read() -> None:
        with paddle.no_grad():
            for name, tensor in tensors.items():
                if name in loaded:
                    placement, shape = learner.placements.of(tensor), tensor.shape
                    fill(tensor, weights, name, placement.global_shape(shape), placement.offset(shape))

    _together(mesh, read)
    return table(found, there, here, wanted, weights)


def _together(mesh: Mesh, work: Any) -> Any:
    """What `work` returns here; the first rank's error on all of them."""
    result, error = None, ""
    try:
        result = work()
    except (PaddleDPError, OSError) as failure:
        error = str(failure)
    mesh.wait("weights read")
    if first := next(filter(None, mesh.gather(error)), ""):
        raise CheckpointError(first)
    return result


def table(found: Match, there: Shapes, here: Shapes, wanted: Load, weights: Source) -> list[str]:
    """The lines on the screen."""
    only = f", only {', '.join(wanted.only)}" if wanted.only else ""
    others = [f"{name} ({list(there[name])} there, {list(here[name])} here)" for name in found.other]
    rows = [
        ("loaded", found.loaded, sum(math.prod(here[name]) for name in found.loaded)),
        ("of another shape, left initial", others, sum(math.prod(here[name]) for name in found.other)),
        ("only there, left over", found.left_over, sum(math.prod(there[name]) for name in found.left_over)),
        ("only here, left initial", found.initial, sum(math.prod(here[name]) for name in found.initial)),
    ]
    return [
        f"weights from {weights.folder}{only}:",
        *(
            f"  {what:<30} {len(names):>5} tensors {numbers:>13,} numbers  {_first(names, ', ')}"
            for what, names, numbers in rows
            if names
        ),
    ]


def _first(words: Sequence[str] | Iterable[str], between: str) -> str:
    words = list(words)
    more = f"{between}and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return between.join(words[:_SHOWN]) + more
