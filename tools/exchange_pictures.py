"""Draws the pictures of docs/learn/exchange.md anew, by the page's own blocks: python tools/exchange_pictures.py

The ring takes a second, the buckets a training of two ranks.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from paddle_dp.figures import INK, new_figure

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/learn/exchange.md"
SHADES = ("#eef2f7", "#c6dcf2", "#9cc5eb", "#6aa3d8", "#3f7fbf")  # by the number of gradients in a part


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
    pictures = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/pictures"
    page = PAGE.read_text()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="paddle-dp-pictures-") as scratch:
        folder = Path(scratch)
        for name, code in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.S | re.M):
            (folder / name).write_text(code)
        for name in ("configs", "models"):
            (folder / name).symlink_to(ROOT / name)
        ring = [sys.executable, "ring.py"]
        printed = subprocess.run(
            ring, cwd=folder, env=environment, check=True, capture_output=True, text=True
        )
        draw_ring(rows_of(printed.stdout), pictures / "learn-ring.png")
        (command,) = re.findall(r"^```bash\n([^`]*name=buckets.*?)^```", page, re.S | re.M)
        subprocess.run(["bash", "-ec", command], cwd=folder, env=environment, check=True)
        shutil.copy(folder / "runs/buckets/timeline.png", pictures / "learn-buckets.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
