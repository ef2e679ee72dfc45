"""Verifies every legal layout of a recipe on up to N ranks against one process; prints one table, also as markdown.

python tools/verify_matrix.py --ranks 4                        # of configs/gpt_tiny.yaml
python tools/verify_matrix.py configs/llama_tiny.yaml --ranks 4 --recompute none full --markdown matrix.md
python tools/verify_matrix.py --ranks 2 train.precision=bfloat16 --twice
python tools/verify_matrix.py --ranks 8 --exactly --only "data 2 × pipeline 2 × tensor 2"

With --twice each layout runs again, and all that it recorded (every loss, gradient, update, state and weight, on each
rank) must have the same bits as the first time.

On CPUs the ranks of all layouts are forks of processes that wait, so that Paddle is imported once; with --fresh each
layout's are started. The numbers are the same.
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paddle_dp.axes.meta_init import anatomy
from paddle_dp.checks.preflight import built_without_memory
from paddle_dp.errors import EndedError, PaddleDPError
from paddle_dp.launch.prepared_ranks import WaitingRanks
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.mesh.degrees import AXES, Degrees
from paddle_dp.plan import Shape, legal_layouts, problems
from paddle_dp.proof.report import number
from paddle_dp.proof.sides import Side, SideRunner
from paddle_dp.proof.verdict import compare_sides
from paddle_dp.recipe import read_recipe
from tools.command_line import parser_of, tell

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
    changed: str | None = None  # what had other bits in a second run; "" where nothing had, None without one


def tried(named: Variant, ranks: int, runner: SideRunner, twice: bool = False) -> Tried:
    """Runs a variant, once or twice. Raises EndedError."""
    layout, words = named
    side, changed = None, None
    start = time.perf_counter()
    try:
        side, why = runner.run_candidate(ranks, words, layout.replace(" ", "")), ""
        if twice:
            again = runner.run_candidate(ranks, words, f"{layout.replace(' ', '')}-again")
            changed = first_change(side, again)
            shutil.rmtree(again.folder)
    except EndedError:
        raise  # a signal ends the whole matrix
    except PaddleDPError as error:
        side, why = None, str(error)
    return Tried(layout, ranks, time.perf_counter() - start, side, why, changed)


def first_change(first: Side, second: Side) -> str:
    """The first recorded quantity whose bits two runs of a layout do not share, with its rank; "" if there is none."""
    for name in ("wide", "own"):
        one, other = first.trace(name), second.trace(name)
        if one is None or other is None:
            if one is not other:
                return f"the run in {'float64' if name == 'wide' else 'its own precision'} ended in one of two runs"
            continue
        for rank, (a, b) in enumerate(zip(one.sheets, other.sheets, strict=True)):
            if a.facts["rows"] != b.facts["rows"]:
                return f"losses or gradient norms ({name}, rank {rank})"
            for key in sorted({*a.group("shard"), *b.group("shard")}):
                has = a.has("shard", key) and b.has("shard", key)
                if not has or a.array("shard", key).tobytes() != b.array("shard", key).tobytes():
                    return f"{key} ({name}, rank {rank})"
    return ""


def row(tried: Tried, one: Side) -> tuple[str, bool]:
    """A variant's line of the table, and whether it is the same as one process, and as itself."""
    if tried.side is None:
        return f"| {tried.layout} | {tried.ranks} | | | | | | {tried.why} |", False
    verdict = compare_sides(one, tried.side)
    largest = [
        number(max(row.worst.r for row in part.summaries)) if part is not None else ""
        for part in (verdict.wide, verdict.native)
    ]
    apart = max(step.loss.distance / max(abs(step.loss.one), 1e-30) for step in verdict.steps.steps)
    said = "same"
    if verdict.first_difference is not None:
        said = f"**different**: {verdict.first_difference.sentence}"
    elif not verdict.same:
        said = verdict.sentences[-1]
    if tried.changed is not None:
        said += f"; **other bits** the second time: {tried.changed}" if tried.changed else "; same bits twice"
    held = f"{max(sum(rank[what] for what in HELD) for rank in tried.side.bytes_by_rank) / 2**10:.0f} kB"
    numbers = " | ".join([*largest, f"{apart:.1e}", f"{tried.seconds:.1f}"])
    return (
        f"| {tried.layout} | {tried.ranks} | {numbers} | {held} | {said} |",
        verdict.same and not tried.changed,
    )


def main() -> int:
    parser = parser_of(__doc__)
    tiny = Path(__file__).resolve().parents[1] / "configs" / "gpt_tiny.yaml"
    parser.add_argument("recipe", type=Path, nargs="?", default=tiny, help="default: configs/gpt_tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=4, help="the most ranks (default 4)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--exactly", action="store_true", help="layouts of exactly --ranks ranks")
    parser.add_argument("--twice", action="store_true", help="each layout once more: are its bits the same?")
    parser.add_argument("--only", nargs="+", metavar="LAYOUT", help="these, by their names in the table")
    parser.add_argument("--recompute", nargs="+", default=["none"], help="each layout with each of these")
    parser.add_argument("--fresh", action="store_true", help="start each layout's ranks anew")
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    given = parser.parse_args()
    recipe = read_recipe(given.recipe, given.overrides)
    model = built_without_memory(recipe.build_model)
    sizes = None if model is None else anatomy(model)
    shape = Shape.from_config(recipe.model.config, recipe.train.batch, recipe.train.micro_batches, sizes)
    shape = shape.along(recipe.dataset.config, cut_lengths=False)
    counts = [given.ranks] if given.exactly else list(range(2, given.ranks + 1))
    layouts = [layout for ranks in counts for layout in legal_layouts(shape, ranks)]
    chosen = [(layout, named) for layout in layouts for named in variants(layout, shape, given.recompute)]
    if given.only:
        names = {named[0] for _, named in chosen}
        if unknown := [name for name in given.only if name not in names]:
            parser.error(f"there is no layout {unknown[0]!r}; there are: {'; '.join(sorted(names))}")
        chosen = [(layout, named) for layout, named in chosen if named[0] in given.only]
    table, all_same = [HEAD, "|---" * 8 + "|"], True
    with scratch_folder("paddle-dp-matrix-") as scratch, WaitingRanks() as waiting:
        words = tuple(given.overrides)
        runner = SideRunner(
            given.recipe, words, given.steps, given.ranks, scratch, measure_memory=True,
            waiting=None if given.fresh else waiting,
        )  # fmt: skip
        every = []
        for layout, named in chosen:
            every.append(tried(named, layout.ranks, runner, given.twice))
            tell(f"{named[0]}: {every[-1].seconds:.1f} s {every[-1].why}")
        one = runner.run_reference([found.side for found in every if found.side is not None])
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
