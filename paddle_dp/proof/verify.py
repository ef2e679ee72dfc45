"""`paddle-dp verify`: runs both sides in real processes, compares them, prints the table and the verdict."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from paddle_dp.errors import UsageError
from paddle_dp.proof.compare import Side, Verdict, compare
from paddle_dp.proof.sides import Comparison
from paddle_dp.recipe import Recipe, read_recipe


def verify(path: Path, overrides: Sequence[str] = (), ranks: int = 2, steps: int = 8) -> int:
    """Compares the recipe's first `steps` steps on one process and on `ranks`; prints; returns the exit status.

    0 when every difference is within what rounding explains, 1 when not. Raises UsageError for fewer than 2 ranks or
    1 step, RecipeError for a recipe with mistakes, RunError when a side could not be run.
    """
    if ranks < 2 or steps < 1:
        raise UsageError(
            f"verify compares one process with 2 ranks or more over 1 step or more: not {ranks}, {steps}."
        )
    recipe = read_recipe(path, overrides)
    with tempfile.TemporaryDirectory(prefix="paddle-dp-verify-") as scratch:
        comparison = Comparison(Path(path), tuple(overrides), steps, ranks, Path(scratch))
        _announce(steps, 1)
        one = comparison.one()
        _announce(steps, ranks)
        many = comparison.many(ranks)
    verdict = compare(one, many, recipe.train.precision.dtype)
    show(recipe, one, many, verdict)
    return 0 if verdict.same else 1


def _announce(steps: int, ranks: int) -> None:
    print(f"running {steps} steps on {ranks} rank{'s' * (ranks > 1)} …", file=sys.stderr, flush=True)


def show(recipe: Recipe, one: Side, many: Side, verdict: Verdict) -> None:
    """Prints the table of steps, the largest differences beside their tolerances, and one sentence."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(
        title=f"{recipe.name}: 1 process and {many.ranks} ranks on the same global batches", box=box.SIMPLE
    )
    for name in ("step", "shares", "loss of 1", f"loss of {many.ranks}", "apart", "gradient norm"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (a, b) in enumerate(zip(one.rows, many.rows, strict=True), start=1):
        losses = [f"{a['loss']:.7f}", f"{b['loss']:.7f}", f"{abs(a['loss'] - b['loss']):.1e}"]
        table.add_row(str(number), _shares(b["shares"]), *losses, f"{b['gradient_norm']:.6f}")
    console.print(table)
    bounds = Table(title=f"largest relative differences in {recipe.train.precision.dtype}", box=box.SIMPLE)
    for name in ("of", "found", "allowed"):
        bounds.add_column(name, justify="left" if name == "of" else "right", no_wrap=True)
    found = (verdict.loss, verdict.gradient_norm, verdict.weights)
    names = ("loss", "gradient norm", f"weights (most in {verdict.worst})")
    for name, value, allowed in zip(names, found, verdict.tolerance, strict=True):
        bounds.add_row(name, f"{value:.1e}", f"{allowed:.0e}")
    console.print(bounds)
    for sentence in sentences(one, many, verdict):
        console.print(sentence)


def _shares(shares: list[int]) -> str:
    """ "16+17+17=50": what each rank had of the global batch."""
    each = (
        "+".join(map(str, shares)) if len(shares) <= 4 else f"{len(shares)}×({min(shares)} to {max(shares)})"
    )
    return f"{each}={sum(shares)}"


def sentences(one: Side, many: Side, verdict: Verdict) -> list[str]:
    """What the comparison means, and what was left out of it."""
    said = [f"{sentence}." for sentence in dict.fromkeys((*one.random, *many.random))]
    if many.local_norms:
        said.append(
            f"{len(many.local_norms)} BatchNorm layers ({many.local_norms[0]}, …) normalize over one rank's samples, "
            "so the runs differ by nature, by as much as shown. strategy.sync_batch_norm=true makes them equal."
        )
    if verdict.same:
        said.append(f"[green]SAME[/green]: {many.ranks} ranks learn what one process learns, to rounding.")
    else:
        said.append(f"[red]DIFFERENT[/red]: {many.ranks} ranks do not learn what one process learns.")
    return said
