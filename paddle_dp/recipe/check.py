"""Checks recipes: prints one line for each correct recipe, and every mistake of the others."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.part.annotation import KEYS
from paddle_dp.part.call import Call
from paddle_dp.recipe.read import foreign_code, read_recipe
from paddle_dp.recipe.recipe import Recipe


def check_all(
    files: Iterable[Path],
    overrides: Sequence[str] = (),
    forecast: Callable[[Recipe, Path], Iterable[str]] | None = None,
    extra_check: Callable[[Recipe, Path], Iterable[str]] | None = None,
    settings_of: Callable[[Path], tuple[Sequence[str], Sequence[str]]] | None = None,
) -> int:
    """Prints a line per recipe, and mistakes to stderr. Returns the exit status: 0, or 2 with any mistake.

    This process imports the parts' modules, but builds no part; modules outside the package are listed. `forecast`
    builds the model and returns further lines; it may raise UsageError for a layout that cannot run. `extra_check`
    compares the initial weights and tries data, model and loss; it returns lines, and may raise UsageError, too.
    `settings_of` returns a recipe's overrides, with numbers for those that depend on its ranks, and lines on them.
    """
    status = 0
    for file in files:
        try:
            foreign = foreign_code(file, overrides)
            settings, remarks = settings_of(file) if settings_of is not None else (overrides, ())
            recipe = read_recipe(file, settings, tries=forecast is not None)
            if not _may_have_loss(recipe):
                raise UsageError(
                    f"{file}: model {recipe.model.name} has no method loss(outputs, targets), so the recipe must name "
                    "one: loss: {use: cross_entropy}, for a classifier."
                )
            weights = list(extra_check(recipe, file)) if extra_check is not None else []
            print(f"{file}: {in_short(recipe)}", flush=True)
            for line in (*remarks, *weights):
                print(f"  {line}", flush=True)
            if foreign:
                print(f"  imported: {', '.join(foreign)}", flush=True)
            for line in forecast(recipe, file) if forecast else _not_compared(recipe):
                print(f"  {line}", flush=True)
        except UsageError as error:
            print(error, file=sys.stderr, flush=True)
            status = error.exit_status
    return status


def _may_have_loss(recipe: Recipe) -> bool:
    """False if a recipe names no loss and no layer in its model's file has one."""
    if recipe.loss is not None or recipe.turns:
        return True
    kind: Any = type(recipe.model.config)
    origin = kind.called if issubclass(kind, Call) else kind
    module = sys.modules.get(origin.__module__)
    if module is None:
        return True
    layers = [
        cls
        for cls in vars(module).values()
        if isinstance(cls, type) and any(base.__module__.startswith("paddle.nn") for base in cls.__mro__)
    ]
    if not layers or any(hasattr(layer, "loss") for layer in layers):
        return True
    try:
        return "loss" in inspect.getsource(module)
    except OSError:
        return True


def in_short(recipe: Recipe) -> str:
    """ "mlp on digits, adamw, data_parallel: 12 epochs of batches of 64"."""
    names = f"{recipe.model.name} on {recipe.dataset.name}, {recipe.optimizer.name}, {recipe.strategy.name}"
    train = recipe.train
    growing = f"{train.batch_ramp.start} to " if train.batch_ramp else ""
    return f"{names}: {train.length} in batches of {growing}{train.batch}"


def _not_compared(recipe: Recipe) -> Iterator[str]:
    """Yields the keys that only the built model, or a sample, could confirm."""
    annotated = recipe.model.annotation is not None  # else these keys are the model's settings
    layers = [f"model.{key}" for key in KEYS if annotated and key in recipe.model.settings]
    named = {"optimizer.groups": recipe.optimizer.groups, "adapter": recipe.adapter}
    parameters = [key for key, value in named.items() if value]
    for compared_with, keys in (("layers", layers), ("parameters", parameters)):
        if keys:
            yield f"not compared with the model's {compared_with}: {', '.join(keys)} (--ranks N builds it)"
    if recipe.loader.pad:
        yield "not compared with the samples: loader.pad (--ranks N reads one)"
