"""Draws the pictures of docs/learn anew, by the pages' own commands: python tools/learn_pictures.py docs/pictures

It takes minutes, and `scikit-learn`. The blocks of the pipeline's model sleep, so two cores are enough for four ranks;
the step times of a busy machine are a little longer.
"""

from __future__ import annotations

import argparse
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

from paddle_dp.figures import INK, QUIET, new_figure

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = ROOT / "docs/learn"
COLOURS = ("#3f7fbf", "#e08a3c", "#6b8e5a")
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


def train(folder: Path) -> None:
    """Runs the commands of cut-models.md in `folder`. Raises CalledProcessError if one of them fails."""
    page = CHAPTERS / "cut-models.md"
    for name, code in code_blocks(page).items():
        (folder / name).write_text(code)
    for name in ("configs", "models"):
        shutil.copytree(ROOT / name, folder / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in [*commands(page), MESH]:
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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pictures", type=Path, nargs="?", default=ROOT / "docs/pictures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paddle-dp-pictures-") as scratch:
        folder = Path(scratch)
        train(folder)
        for run in sorted((folder / "runs").glob("learn-*")):
            picture = next(run / name for name in ("timeline.png", "mesh.png") if (run / name).exists())
            shutil.copy(picture, given.pictures / f"{run.name}.png")
        draw_micro_batches(micro_batches(folder / "runs"), 32, given.pictures / "learn-micro-batches.png")
        draw_staleness(staleness_losses(folder), given.pictures / "learn-staleness.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
