"""Measures a step with branches on two ranks, beside one rank and beside data parallelism on both, in one job.

    python tools/benchmark/branches.py                     # the siamese network, wider, and Inception v3

The three live in the same ranks and take turns, so that whatever else this machine does meets all of them. A row has
the medians of the turns' milliseconds a step, and of their ratios to one rank.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.run_job import ROOT, run_job

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


def batches(loader: Any) -> Iterator[Any]:
    """The batches of epoch after epoch, without end."""
    for epoch in itertools.count():
        yield from loader.read(epoch)


def measure(recipe: Any, options: dict[str, Any]) -> None:
    """In both ranks: trains the recipe under each strategy in turns; rank 0 writes seconds a step."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import Mesh, join
    from paddle_dp.recipe import read_recipe

    mesh = join(seed=0)
    trainers: dict[str, Any] = {}
    for name, strategy in STRATEGIES.items():
        words = [f"strategy={strategy}", f"output_dir={options['folder']}/{name}", "callbacks=[]"]
        alone = name == "one rank"
        if mesh.is_main or not alone:
            where = Mesh.alone() if alone else mesh
            trainers[name] = build(read_recipe(Path(options["recipe"]), [*words, *options["words"]]), where)
    seconds: dict[str, list[float]] = {name: [] for name in STRATEGIES}

    streams = {name: batches(trainer.loader) for name, trainer in trainers.items()}
    for turn in range(TURNS + 1):
        for name in STRATEGIES:
            mesh.sum([0.0])
            began = time.perf_counter()
            for _ in range(options["steps"]):
                if name in trainers:
                    trainers[name].learner.train_batch(next(streams[name]))
            mesh.sum([0.0])
            if turn:
                seconds[name].append((time.perf_counter() - began) / options["steps"])
    if mesh.is_main:
        Path(options["folder"], "seconds.json").write_text(json.dumps(seconds))


def main() -> None:
    print("| model | one rank, ms | branches on 2, ms | ratio | data on 2, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for case, (name, words, steps) in CASES.items():
        with tempfile.TemporaryDirectory(prefix="branches-") as folder:
            recipe = ROOT / "configs" / f"{name}.yaml"
            extra = {"folder": folder, "recipe": str(recipe), "words": words, "steps": steps}
            run_job("tools.benchmark.branches:measure", recipe, 2, folder, extra=extra)
            seconds = json.loads(Path(folder, "seconds.json").read_text())
        one, branches, data = (1e3 * statistics.median(seconds[name]) for name in STRATEGIES)
        ratios = [
            statistics.median(a / b for a, b in zip(seconds[which], seconds["one rank"], strict=True))
            for which in ("branches", "data")
        ]
        print(
            f"| {case} | {one:.0f} | {branches:.0f} | {ratios[0]:.2f} | {data:.0f} | {ratios[1]:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
