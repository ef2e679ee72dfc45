"""Measures a step with branches on two ranks, beside one rank and beside data parallelism on both, in one job.

    python tools/benchmark/branches.py                     # the siamese network, wider, and Inception v3

The three live in the same ranks and take turns, so that whatever else this machine does meets all of them. A row has
the medians of the turns' milliseconds a step, and of their ratios to one rank.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.run_job import ROOT
from tools.benchmark.turns import ratio, seconds_of_job, train_in_turns
from tools.tables import table_head, table_row

CASES = {
    "siamese_digits, towers of 2 × 1024, shared": ("siamese_digits", ["model.hidden=[1024,1024]"], 10),
    "siamese_digits, towers of 2 × 1024, apart": (
        "siamese_digits",
        ["model.hidden=[1024,1024]", "model.shared=false"],
        10,
    ),
    "inception_v3, 75 × 75, batch 8": ("inception_branches", [], 1),
}
TURNS = 5
STRATEGIES = {
    "one rank": "{use: single}",
    "branches": "{use: branches, over: 2}",
    "data": "{use: data_parallel}",
}


def measure(recipe: Any, options: dict[str, Any]) -> None:
    """In both ranks: trains the recipe under each strategy in turns; rank 0 writes seconds a step."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import Mesh, join
    from paddle_dp.recipe import read_recipe

    mesh = join(seed=0)
    trainers: dict[str, Any] = dict.fromkeys(STRATEGIES)
    for name, strategy in STRATEGIES.items():
        words = [f"strategy={strategy}", f"output_dir={options['folder']}/{name}", "callbacks=[]"]
        alone = name == "one rank"
        if mesh.is_main or not alone:
            where = Mesh.alone() if alone else mesh
            trainers[name] = build(read_recipe(Path(options["recipe"]), [*words, *options["words"]]), where)
    train_in_turns(trainers, mesh, options["steps"], TURNS, options["folder"])


def main() -> None:
    print(table_head(["model", "one rank, ms", "branches on 2, ms", "ratio", "data on 2, ms", "ratio"]))
    for case, (name, words, steps) in CASES.items():
        recipe = ROOT / "configs" / f"{name}.yaml"
        seconds = seconds_of_job("tools.benchmark.branches:measure", recipe, 2, words=words, steps=steps)
        one, *others = seconds.values()
        cells = [case, f"{1e3 * statistics.median(one):.0f}"]
        for times in others:
            cells += [f"{1e3 * statistics.median(times):.0f}", f"{ratio(times, one):.2f}"]
        print(table_row(cells), flush=True)


if __name__ == "__main__":
    main()
