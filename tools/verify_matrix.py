"""Every legal layout of a recipe on up to N ranks, each against one process; one table, also as markdown.

python tools/verify_matrix.py configs/gpt_tiny.yaml --ranks 4 --markdown docs/matrix.md
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paddle_dp.errors import PaddleDPError
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan import Shape, legal_layouts
from paddle_dp.proof.compare import Side, compare
from paddle_dp.proof.sides import Comparison
from paddle_dp.recipe import read_recipe

AXES = ("data", "pipeline", "sharding", "tensor")
HELD = ("parameters", "most gradients", "optimizer")  # at rest, in backward, at rest
HEAD = "| layout | ranks | loss | gradient norm | weights | seconds | held by a rank | verdict |"


def variants(layout: Degrees) -> list[tuple[str, list[str]]]:
    """The layout's name and its overrides; with sharding, one for each stage."""
    words = ["strategy.use=hybrid", *(f"strategy.{axis}={layout[axis]}" for axis in AXES)]
    if layout.sharding == 1:
        return [(str(layout), words)]
    return [(f"{layout}, stage {stage}", [*words, f"strategy.stage={stage}"]) for stage in (1, 2, 3)]


def row(
    named: tuple[str, list[str]], ranks: int, comparison: Comparison, one: Side, dtype: str
) -> tuple[str, bool]:
    """A variant's line of the table, and whether it is the same as one process."""
    layout, words = named
    start = time.perf_counter()
    try:
        many = comparison.many(ranks, words, layout.replace(" ", ""))
    except PaddleDPError as error:
        return f"| {layout} | {ranks} | | | | | | {error} |", False
    verdict, seconds = compare(one, many, dtype), time.perf_counter() - start
    found = (verdict.loss, verdict.gradient_norm, verdict.weights)
    numbers = " | ".join(f"{value:.1e}" for value in found)
    said = "same" if verdict.same else "**different**"
    held = f"{max(sum(rank[what] for what in HELD) for rank in many.held) / 2**10:.0f} kB"
    return f"| {layout} | {ranks} | {numbers} | {seconds:.1f} | {held} | {said} |", verdict.same


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=4, help="the most ranks (default 4)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--exactly", action="store_true", help="layouts of exactly that many ranks")
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    given = parser.parse_args()
    recipe = read_recipe(given.recipe, given.overrides)
    shape = Shape.of(recipe.model.config, recipe.train.batch, recipe.train.micros)
    counts = [given.ranks] if given.exactly else list(range(2, given.ranks + 1))
    layouts = [layout for ranks in counts for layout in legal_layouts(shape, ranks, axes=AXES)]
    table, all_same = [HEAD, "|---" * 8 + "|"], True
    with tempfile.TemporaryDirectory(prefix="paddle-dp-matrix-") as scratch:
        comparison = Comparison(given.recipe, tuple(given.overrides), given.steps, given.ranks, Path(scratch))
        one = comparison.one()
        print("\n".join(table), flush=True)
        for named, ranks in [(named, layout.ranks) for layout in layouts for named in variants(layout)]:
            line, same = row(named, ranks, comparison, one, recipe.train.precision.dtype)
            print(line, flush=True)
            table, all_same = [*table, line], all_same and same
    if given.markdown:
        given.markdown.write_text("\n".join(table) + "\n")
    return 0 if all_same else 1


if __name__ == "__main__":
    sys.exit(main())
