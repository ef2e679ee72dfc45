"""Draws the pictures of docs/learn anew, by the pages' own blocks: python tools/learn_pictures.py docs/pictures

It takes minutes, and `scikit-learn`. The blocks of the pipeline's model sleep, so two cores are enough for four ranks;
the step times of a busy machine are a little longer.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from paddle_dp.figures import INK, QUIET, new_figure
from tools.command_line import ROOT, parser_of

CHAPTERS = ROOT / "docs/learn"
COLOURS = ("#3f7fbf", "#e08a3c", "#6b8e5a")
SHADES = ("#eef2f7", "#c6dcf2", "#9cc5eb", "#6aa3d8", "#3f7fbf")  # by the number of gradients in a part
AGES = (0, 1, 2, 4, 8, 16)
MESH = (
    "paddle-dp train configs/gpt_tiny.yaml --ranks 4 name=learn-four-devices strategy.pipeline=2 "
    '"train.length=2 steps" "callbacks=[{use: dashboard}]"\n'
)


def code_blocks(page: Path) -> dict[str, str]:
    """The page's files of Python: blocks that begin with `# name.py`."""
    return dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page.read_text(), re.S | re.M))


def commands(page: Path) -> list[str]:
    """The page's commands on the pipeline of four stages."""
    blocks = re.findall(r"^<!-- run[^>]* -->\n+```bash\n(.*?)^```", page.read_text(), re.S | re.M)
    return [block for block in blocks if "four_stages.yaml" in block]


def run(page: Path, folder: Path, *commands: str) -> None:
    """Runs commands of a page in `folder`, beside its files. Raises CalledProcessError if one of them fails."""
    for name, code in code_blocks(page).items():
        (folder / name).write_text(code)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in commands:
        subprocess.run(["bash", "-eo", "pipefail", "-c", command], cwd=folder, env=environment, check=True)


def micro_batches(runs: Path) -> list[tuple[int, float]]:
    """Numbers of micro-batches m and seconds of a step, of the runs m1, m2, …"""
    points = []
    for run in runs.glob("m[0-9]*"):
        batches = json.loads((run / "timeline.json").read_text())["batches"]
        seconds = median(max(span["stop"] for span in batch["spans"]) for batch in batches)
        points.append((int(run.name[1:]), seconds))
    return sorted(points)


def axes(title: str, across: str, up: str) -> tuple[Any, Any]:
    figure = new_figure(8, 4, dpi=150, facecolor="white", layout="constrained")
    drawn = figure.subplots()
    drawn.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
    drawn.set_xlabel(across, fontsize=9, color=QUIET)
    drawn.set_ylabel(up, fontsize=9, color=QUIET)
    drawn.tick_params(labelsize=9, labelcolor=INK)
    for side in ("top", "right"):
        drawn.spines[side].set_visible(False)
    return figure, drawn


def draw_micro_batches(points: list[tuple[int, float]], samples: int, file: Path) -> None:
    """The measured throughput by m, above the formula's: two stages of two blocks, 2 ms for each start and sample."""
    figure, drawn = axes(
        "Two stages, a batch of 32 samples", "micro-batches m (logarithmic)", "samples a second"
    )
    counts = [m for m, _ in points]
    formula = [samples / (0.012 * (m + 1) * (1 + samples / m)) for m in counts]
    drawn.plot(counts, formula, "--", color=QUIET, label="formula: (m + p − 1)(a + bN/m), sends take no time")
    drawn.plot(counts, [samples / seconds for _, seconds in points], "o-", color=COLOURS[0], label="measured")
    drawn.set_xscale("log", base=2)
    drawn.set_xticks(counts, [str(m) for m in counts])
    drawn.set_ylim(bottom=0)
    drawn.legend(frameon=False, fontsize=9)
    figure.savefig(file)


def staleness_losses(folder: Path) -> dict[float, list[float]]:
    """Held-out losses by learning rate, for gradients of `AGES`, by the script of parameter-servers.md."""
    script = folder / "staleness.py"
    script.write_text(code_blocks(CHAPTERS / "parameter-servers.md")[script.name])
    held_out = runpy.run_path(str(script))["held_out"]
    return {rate: [held_out(age, rate)[0] for age in AGES] for rate in (0.1, 0.02, 0.005)}


def draw_staleness(losses: dict[float, list[float]], file: Path) -> None:
    title = "Digits, 460 updates with old gradients"
    figure, drawn = axes(title, "staleness: age of a gradient, in updates", "held-out loss")
    ceiling = 2.5
    for (rate, values), colour in zip(losses.items(), COLOURS, strict=True):
        shown = [loss if loss < ceiling else ceiling for loss in values]  # NaN is not less
        drawn.plot(AGES, shown, "o-", color=colour, markersize=4, label=f"rate {rate}")
    drawn.axhline(2.303, color=QUIET, linewidth=0.8, linestyle=":")
    drawn.text(16.2, 2.29, "ln 10: knows nothing", fontsize=8, color=QUIET, ha="right", va="top")
    drawn.set_xticks(AGES)
    drawn.set_ylim(0, ceiling + 0.05)
    drawn.set_yticks([0, 0.5, 1, 1.5, 2, ceiling], ["0", "0.5", "1", "1.5", "2", "more, or NaN"])
    drawn.legend(frameon=False, fontsize=9, loc="center right")
    figure.savefig(file)


def rows_of(printed: str) -> list[list[list[str]]]:
    """Of what ring.py prints: the parts that each rank holds after each turn, and before the first one."""
    turns = [line.split(" | ")[1:] for line in printed.splitlines() if re.match(r"\d+ \|", line)]
    rows = [[rank.split() for rank in turn] for turn in turns]
    ranks = len(rows[0])
    return [[[str(10**rank)] * ranks for rank in range(ranks)], *rows]


def draw_ring(rows: list[list[list[str]]], file: Path) -> None:
    """A row for each turn, a group of cells for each rank; the part that has arrived in that turn has a frame."""
    from matplotlib.patches import Rectangle

    ranks = len(rows[0])
    figure = new_figure(9, 4.2, dpi=150, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for turn, row in enumerate(rows):
        name = "before" if turn == 0 else f"turn {turn}: {'adds' if turn < ranks else 'copies'}"
        axes.text(-0.2, turn + 0.45, name, ha="right", va="center", fontsize=9, color=INK)
        for rank, parts in enumerate(row):
            for number, part in enumerate(parts):
                left = rank * (ranks + 0.7) + number
                arrived = turn > 0 and number == (rank - turn) % ranks
                edge, width = (INK, 1.6) if arrived else ("white", 0.8)
                shade = SHADES[part.count("1")]
                box = Rectangle((left, turn), 0.96, 0.88, facecolor=shade, edgecolor=edge, linewidth=width)
                axes.add_patch(box)
                light = "white" if part.count("1") == ranks else INK
                axes.text(left + 0.48, turn + 0.45, part, ha="center", va="center", fontsize=7.5, color=light)
    for rank in range(ranks):
        middle = rank * (ranks + 0.7) + ranks / 2
        axes.text(middle, -0.3, f"rank {rank}", ha="center", fontsize=9.5, color=INK, fontweight="bold")
    axes.set_xlim(-3, ranks * (ranks + 0.7))
    axes.set_ylim(len(rows) + 0.1, -0.8)
    axes.axis("off")
    title = f"A ring of {ranks} ranks: {len(rows) - 1} turns; framed: what the left neighbour has sent"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK, fontweight="bold")
    figure.savefig(file)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("pictures", type=Path, nargs="?", default=ROOT / "docs/pictures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paddle-dp-pictures-") as scratch:
        folder = Path(scratch)
        for name in ("configs", "models"):
            shutil.copytree(ROOT / name, folder / name)
        cut, exchange = CHAPTERS / "cut-models.md", CHAPTERS / "exchange.md"
        run(cut, folder, *commands(cut), MESH)
        for training in sorted((folder / "runs").glob("learn-*")):
            pictures = (training / name for name in ("timeline.png", "mesh.png"))
            shutil.copy(next(filter(Path.exists, pictures)), given.pictures / f"{training.name}.png")
        draw_micro_batches(micro_batches(folder / "runs"), 32, given.pictures / "learn-micro-batches.png")
        draw_staleness(staleness_losses(folder), given.pictures / "learn-staleness.png")
        run(exchange, folder, f"{sys.executable} ring.py > ring.txt")
        draw_ring(rows_of((folder / "ring.txt").read_text()), given.pictures / "learn-ring.png")
        (buckets,) = re.findall(r"^```bash\n([^`]*name=buckets.*?)^```", exchange.read_text(), re.S | re.M)
        run(exchange, folder, buckets)
        shutil.copy(folder / "runs/buckets/timeline.png", given.pictures / "learn-buckets.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
