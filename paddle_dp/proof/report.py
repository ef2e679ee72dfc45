"""Shows a verdict as text (two small tables and sentences, 80 columns) and as JSON."""

from __future__ import annotations

import math
from typing import Any

from paddle_dp.proof.compare import TraceComparison
from paddle_dp.proof.steps import shares
from paddle_dp.proof.tolerance import LARGEST_R
from paddle_dp.proof.verdict import Verdict
from paddle_dp.recipe import Guard, Recipe
from paddle_dp.text import gigabytes


def show(recipe: Recipe, verdict: Verdict, seconds: float) -> None:
    """Prints the steps, the table of distances, the cost, and the sentences."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console, candidate = Console(highlight=False), verdict.candidate
    table = Table(
        title=f"{recipe.name}: 1 process and {candidate.ranks} ranks on the same global batches, "
        f"{verdict.native.dtype}",
        box=box.SIMPLE,
        caption=None if all(step.is_read for step in verdict.steps.steps) else _UNREAD,
    )
    for name in ("step", "shares", "loss of 1", f"loss of {candidate.ranks}", "apart", "strays", "norm"):
        table.add_column(name, justify="right", no_wrap=True)
    for step in verdict.steps.steps:
        table.add_row(
            str(step.number), shares(step.shares), f"{step.loss.one:.7f}", _read(step.loss.many, ".7f"),
            _read(step.loss.distance if step.is_read else None, ".1e"), f"{step.loss.drift:.1e}",
            _read(step.gradient_norm.many, ".6f"),
        )  # fmt: skip
    console.print(table)
    console.print(_distances(verdict))
    console.print(_cost(verdict, seconds))
    if guard := without_guard(recipe):
        settings = ", ".join(f"{name}: {value}" for name, value in guard.items())
        console.print(f"without the recipe's guard: {settings}", markup=False)
    for sentence in verdict.sentences:
        console.print(_coloured(sentence))


_UNREAD = "–: not read, as in most updates of a training; judged by the weights"


def _read(number: float | None, digits: str) -> str:
    return "–" if number is None else format(number, digits)


def _distances(verdict: Verdict) -> Any:
    """The table of the largest distance by precision and kind of quantity."""
    from rich import box
    from rich.table import Table

    title = f"distance in units of one process's own noise: r ≤ {LARGEST_R:g} is the same"
    table = Table(title=title, box=box.SIMPLE)
    for name in ("in", "of", "how many", "largest r", "which"):
        table.add_column(name, justify="right" if name in ("how many", "largest r") else "left")
    for comparison in verdict.comparisons:
        for summary in comparison.summaries:
            worst = summary.worst
            name = worst.quantity.name or f"step {worst.quantity.step}"
            table.add_row(comparison.dtype, summary.kind, str(summary.count), number(worst.r), name)
    steps = verdict.steps.steps
    step = max(steps, key=lambda step: step.r)
    table.add_row("steps", "numbers", str(len(steps)), number(step.r), f"step {step.number}")
    table.add_row("steps", "weights", "all", number(verdict.steps.weights.r), "after the last step")
    return table


def _cost(verdict: Verdict, seconds: float) -> str:
    comparisons = verdict.comparisons
    numbers = sum(comparison.reference.facts.get("numbers", 0) for comparison in comparisons)
    traces = [trace for comparison in comparisons for trace in comparison.sides]
    inner = sum(trace.facts["seconds"] for trace in traces)
    quantities = sum(len(comparison.distances) for comparison in comparisons)
    memory = gigabytes(max(verdict.reference.memory, verdict.candidate.memory))
    return (
        f"{seconds:.1f} s, of which {inner:.1f} s steps (the rest starts processes), {memory} in the largest process, "
        f"compared {quantities} quantities of {numbers:,} numbers."
    )


def without_guard(recipe: Recipe) -> dict[str, str]:
    """The recipe's guard settings that are not the default; both sides run without them."""
    default = vars(Guard())
    return {name: str(value) for name, value in vars(recipe.guard).items() if value != default[name]}


def number(r: float) -> str:
    """An r in few characters: 0.83, 12, 3.1e+08."""
    return f"{r:.2g}" if r < 1000 or math.isinf(r) else f"{r:.1e}"


def _coloured(sentence: str) -> Any:
    from rich.text import Text

    colours = {
        "SAME up to": "yellow", "SAME": "green", "DIFFERENT": "red", "FAILED": "red", "PROVES NOTHING": "yellow",
    }  # fmt: skip
    begins = (name for name in colours if sentence.startswith((f"{name}:", f"{name} step ")))
    name = next(begins, "")
    return Text.assemble((name, colours.get(name, "")), sentence.removeprefix(name))


def as_json(recipe: Recipe, verdict: Verdict, seconds: float) -> dict[str, Any]:
    """The verdict as JSON values (keys: docs/proof.md); infinities and NaN are strings."""
    difference, insensitive = verdict.first_difference, verdict.insensitive
    return {
        "recipe": recipe.name, "parameters": verdict.reference.parameters,
        "ranks": verdict.candidate.ranks, "axes": verdict.candidate.axes,
        "verdict": verdict.label, "status": verdict.status, "allowed": LARGEST_R,
        "where": None if difference is None else vars(difference),
        "float64": _comparison_json(verdict.wide, verdict.candidate.ranks),
        "own": _comparison_json(verdict.native, verdict.candidate.ranks),
        "steps": [
            {
                "step": step.number, "shares": list(step.shares), "loss": _plain(vars(step.loss)),
                "gradient_norm": _plain(vars(step.gradient_norm)), "r": _plain(step.r),
                "scores": {name: _plain(vars(pair)) for name, pair in step.scores.items()},
            }
            for step in verdict.steps.steps
        ],
        "weights": {"r": _plain(verdict.steps.weights.r)},
        "without_guard": without_guard(recipe) or None,
        "insensitive": None if insensitive is None else {"name": insensitive[0], "shows": _plain(insensitive[1])},
        "dependence": _plain(verdict.reference.facts.get("dependence")),
        "without_gradient": [d.quantity.name for d in (verdict.wide or verdict.native).without_gradient],
        "sentences": verdict.sentences,
        "seconds": round(seconds, 2),
        "memory": {"one": verdict.reference.memory, "many": verdict.candidate.memory},
    }  # fmt: skip


def _comparison_json(comparison: TraceComparison | None, ranks: int) -> dict[str, Any] | None:
    if comparison is None:
        return None
    rows = {
        summary.kind: {
            "count": summary.count, "r": _plain(summary.worst.r),
            "worst": summary.worst.quantity.name, "step": summary.worst.quantity.step,
        }
        for summary in comparison.summaries
    }  # fmt: skip
    visible = {"noise": _plain(comparison.noise), "visible": _plain(comparison.visible(ranks))}
    return {"dtype": comparison.dtype, "same": comparison.same, **visible, "rows": rows}


def _plain(value: Any) -> Any:
    """The value with infinities and NaN as strings."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
