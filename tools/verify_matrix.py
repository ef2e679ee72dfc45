"""Verifies every legal layout of a recipe on up to N ranks against one process; prints one table, also as markdown.

python tools/verify_matrix.py --ranks 4                        # of configs/gpt_tiny.yaml
python tools/verify_matrix.py configs/llama_tiny.yaml --ranks 4 --recompute none full --markdown matrix.md
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paddle_dp.errors import EndedError, PaddleDPError
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.mesh.degrees import AXES, Degrees
from paddle_dp.parallel.meta_init import anatomy
from paddle_dp.plan import Shape, legal_layouts, problems
from paddle_dp.proof.report import number
from paddle_dp.proof.sides import Comparison, Side
from paddle_dp.proof.verdict import compare_sides
from paddle_dp.recipe import read_recipe

HELD = ("parameters", "most gradients", "optimizer")  # at rest, in backward, at rest
HEAD = "| layout | ranks | r in float64 | r in its own | loss apart | seconds | held by a rank | verdict |"


Variant = tuple[str, list[str]]


def variants(layout: Degrees, shape: Shape, again: list[str]) -> list[Variant]:
    """The layout's names and overrides: with tensor, with and without sequence_parallel; with sharding, each stage."""
    found: list[Variant] = [
        (str(layout), ["strategy.use=hybrid", *(f"strategy.{axis}={layout[axis]}" for axis in AXES)])
    ]
    if layout.tensor > 1 and not problems(layout, replace(shape, cut_lengths=True), layout.ranks):
        found = _each(found, "sequence_parallel", ["false", "true"])
    if layout.sharding > 1:
        found = _each(found, "sharding_stage", ["1", "2", "3"])
    return _each(found, "recompute", again)


def _each(variants: list[Variant], setting: str, values: list[str]) -> list[Variant]:
    """Every variant with every value of a setting; the name omits `none` and `false`, and `true` behind the setting."""
    plain = ("none", "false")
    named = {v: "" if v in plain else f", {setting} {v}".removesuffix(" true") for v in values}
    return [(n + named[v], [*words, f"strategy.{setting}={v}"]) for n, words in variants for v in values]


@dataclass(frozen=True)
class Tried:
    """A variant on its ranks: its side, or the error (`why`)."""

    layout: str
    ranks: int
    seconds: float
    side: Side | None
    why: str = ""


def tried(named: Variant, ranks: int, comparison: Comparison) -> Tried:
    """Runs a variant. Raises EndedError."""
    layout, words = named
    start = time.perf_counter()
    try:
        side, why = comparison.many(ranks, words, layout.replace(" ", "")), ""
    except EndedError:
        raise  # a signal ends the whole matrix
    except PaddleDPError as error:
        side, why = None, str(error)
    return Tried(layout, ranks, time.perf_counter() - start, side, why)


def row(tried: Tried, one: Side) -> tuple[str, bool]:
    """A variant's line of the table, and whether it is the same as one process."""
    if tried.side is None:
        return f"| {tried.layout} | {tried.ranks} | | | | | | {tried.why} |", False
    verdict = compare_sides(one, tried.side)
    largest = [
        number(max(row.worst.r for row in part.rows)) if part is not None else ""
        for part in (verdict.wide, verdict.own)
    ]
    apart = max(step.loss.apart / max(abs(step.loss.one), 1e-30) for step in verdict.steps.steps)
    said = "same"
    if verdict.where is not None:
        said = f"**different**: {verdict.where.sentence}"
    elif not verdict.same:
        said = verdict.sentences[-1]
    held = f"{max(sum(rank[what] for what in HELD) for rank in tried.side.held) / 2**10:.0f} kB"
    numbers = " | ".join([*largest, f"{apart:.1e}", f"{tried.seconds:.1f}"])
    return f"| {tried.layout} | {tried.ranks} | {numbers} | {held} | {said} |", verdict.same


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tiny = Path(__file__).resolve().parents[1] / "configs" / "gpt_tiny.yaml"
    parser.add_argument("recipe", type=Path, nargs="?", default=tiny, help="default: configs/gpt_tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=4, help="the most ranks (default 4)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--exactly", action="store_true", help="layouts of exactly --ranks ranks")
    parser.add_argument("--recompute", nargs="+", default=["none"], help="each layout with each of these")
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    given = parser.parse_args()
    recipe = read_recipe(given.recipe, given.overrides)
    seen = anatomy(recipe.model.build)
    shape = Shape.of(recipe.model.config, recipe.train.batch, recipe.train.micro_batches, seen)
    shape = shape.along(recipe.dataset.config, cut_lengths=False)
    counts = [given.ranks] if given.exactly else list(range(2, given.ranks + 1))
    layouts = [layout for ranks in counts for layout in legal_layouts(shape, ranks)]
    table, all_same = [HEAD, "|---" * 8 + "|"], True
    with scratch_folder("paddle-dp-matrix-") as scratch:
        words = tuple(given.overrides)
        comparison = Comparison(given.recipe, words, given.steps, given.ranks, scratch, measure_memory=True)
        every = []
        for layout in layouts:
            for named in variants(layout, shape, given.recompute):
                every.append(tried(named, layout.ranks, comparison))
                print(f"{named[0]}: {every[-1].seconds:.1f} s {every[-1].why}", file=sys.stderr, flush=True)
        one = comparison.one([found.side for found in every if found.side is not None])
        for found in every:
            line, same = row(found, one)
            table, all_same = [*table, line], all_same and same
    print("\n".join(table), flush=True)
    if given.markdown:
        given.markdown.write_text("\n".join(table) + "\n")
    return 0 if all_same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except EndedError as error:
        sys.exit(error.exit_status)
