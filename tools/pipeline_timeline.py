"""Measures the idle time of a pipeline's stages for several numbers of micro-batches, next to the formula's prediction.

python tools/pipeline_timeline.py configs/gpt_pipeline2.yaml --ranks 2 --pictures docs/pictures
python tools/pipeline_timeline.py configs/gpt_pipeline2.yaml --ranks 4 --micro-batches 1 4 --calm 0 model.depth=8

With one micro-batch, one stage works at a time. A schedule is omitted for numbers of micro-batches that it cannot run.

Every case trains the recipe with the callback timeline, with equal micro-batches. The steps that count (`--count`) are
those in which other programs took the least of the ranks' cores; a case is repeated while they took too much
(`--calm`), and the table shows the share of a core that was left.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paddle_dp.plan.pipeline_schedule import bubble, check_schedule
from paddle_dp.recipe import read_recipe
from tools.command_line import paddle_dp, parser_of, tell

HEAD = "| schedule | micro-batches m | idle, each rank | mean | formula | off by | share of a core |"
CASES = {"f_then_b": 1, "1f1b": 1, "interleaved": 2}  # schedule: stages on each rank


def partition(depth: int, stages: int) -> str:
    """A strategy.partition with equal numbers of blocks, plus embedding and head on the first and last stage."""
    each, more = divmod(depth, stages)
    counts = [each + (number < more) for number in range(stages)]
    counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
    return str(counts)


def overrides(given: argparse.Namespace, schedule: str, micro_batches: int) -> list[str]:
    depth = read_recipe(given.recipe, given.overrides).model.config.depth
    each = CASES[schedule]
    return [
        *given.overrides,
        f"strategy.pipeline={given.ranks}",
        f"strategy.pipeline_schedule={schedule}",
        f"strategy.virtual_stages={each}",
        f"strategy.partition={partition(depth, given.ranks * each)}",
        f"train.micro_batches={micro_batches}",
        f"train.batch={micro_batches * given.samples}",
        f"train.length={given.steps + 3} steps",
        f"callbacks=[{{use: timeline, start: 3, steps: {given.steps}}}]",
    ]


def measure(
    given: argparse.Namespace, schedule: str, micro_batches: int
) -> tuple[list[dict[str, Any]], bytes]:
    """The least disturbed steps of a case, and the picture of such a run. Raises RuntimeError if a training fails."""
    calmest: list[dict[str, Any]] = []
    pictures: list[tuple[float, bytes]] = []
    with tempfile.TemporaryDirectory(prefix="paddle-dp-timeline-") as scratch:
        for attempt in range(given.attempts):
            folder = Path(scratch) / str(attempt) / given.recipe.stem  # the folder's name is the run's
            words = ["--ranks", given.ranks, "--out", folder, *overrides(given, schedule, micro_batches)]
            command = paddle_dp("train", given.recipe, *words)
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
            steps = json.loads((folder / "timeline.json").read_text())["batches"]
            pictures.append((max(step["calm"] for step in steps), (folder / "timeline.png").read_bytes()))
            calmest = sorted([*calmest, *steps], key=lambda step: -step["calm"])[: given.count]
            if calmest[-1]["calm"] >= given.calm:
                break
            left = f"{calmest[-1]['calm']:.0%} of a core"
            tell(f"  {schedule}, {micro_batches} micro_batches: {left}; once more")
    return calmest, max(pictures)[1]


def row(schedule: str, micro_batches: int, ranks: int, steps: list[dict[str, Any]]) -> tuple[str, bool]:
    """A line of the table, and whether measurement and formula are within 15 points of each other."""
    predicted = bubble(ranks, micro_batches, CASES[schedule])
    shares = [median(values) for values in zip(*(step["idle"] for step in steps), strict=True)]
    mean = sum(shares) / len(shares)
    each, left = ", ".join(f"{share:.1%}" for share in shares), f"{steps[-1]['calm']:.0%}"
    off = f"{100 * (mean - predicted):+.1f} points"
    line = f"| {schedule} | {micro_batches} | {each} | {mean:.1%} | {predicted:.1%} | {off} | {left} |"
    return line, abs(mean - predicted) <= 0.15


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("recipe", type=Path, help="of a model with `depth`, on hybrid with a pipeline")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--ranks", type=int, default=2, help="how many; all of them stages (default 2)")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--schedules", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--samples", type=int, default=4, help="in each micro-batch (default 4)")
    parser.add_argument("--steps", type=int, default=20, help="recorded in each run (default 20)")
    parser.add_argument("--count", type=int, default=5, help="steps that count, the calmest (default 5)")
    parser.add_argument("--calm", type=float, default=0.95, help="share of a core a rank should have had")
    parser.add_argument("--attempts", type=int, default=5, help="runs of a case at most (default 5)")
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    parser.add_argument("--pictures", type=Path, help="put a picture of each case here")
    return parser.parse_intermixed_args()


def main() -> int:
    given = arguments()
    if given.pictures:
        given.pictures.mkdir(parents=True, exist_ok=True)
    table, close = [HEAD, "|---" * 7 + "|"], True
    print("\n".join(table), flush=True)
    for schedule in given.schedules:
        for micro_batches in given.micro_batches:
            if reasons := check_schedule(schedule, given.ranks, micro_batches, CASES[schedule]):
                tell(f"  {schedule}, {micro_batches} micro_batches: {reasons[0]}")
                continue
            steps, picture = measure(given, schedule, micro_batches)
            line, near = row(schedule, micro_batches, given.ranks, steps)
            print(line, flush=True)
            table, close = [*table, line], close and near
            if given.pictures:
                (given.pictures / f"timeline-{schedule}-m{micro_batches}.png").write_bytes(picture)
    if given.markdown:
        given.markdown.write_text("\n".join(table) + "\n")
    return 0 if close else 1


if __name__ == "__main__":
    sys.exit(main())
