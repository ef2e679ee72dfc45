"""Evaluates a run's checkpoint on every held-out sample, each once; the script for Paddle's own launcher.

    python -m paddle.distributed.launch --nproc_per_node 2 tools/evaluate.py runs/digits_mlp --checkpoint best
    python tools/evaluate.py runs/digits_mlp                                          # one process

`paddle-dp evaluate` does the same with a supervisor around it.
"""

import os
import sys
from pathlib import Path

sys.path[0] = os.getcwd()  # in place of tools/, whose files would hide packages of the same names
sys.path.append(str(Path(__file__).resolve().parent.parent))

from paddle_dp.launch.recipe_rank import main  # noqa: E402

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: {Path(sys.argv[0]).name} RUN [--checkpoint newest|best|PATH] [-o KEY=VALUE …]")
    run = sys.argv[1]
    main("evaluate", ["-c", str(Path(run) / "recipe.yaml"), "--out", run, *sys.argv[2:]])
