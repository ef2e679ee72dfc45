"""Measures what it costs that rank 0 reads for all (dataset.reading: scatter), beside each rank reading, in one job.

    python tools/benchmark/reading.py                        # 2 ranks, small samples and images, 0 and 1 data workers
    python tools/benchmark/reading.py --ranks 3

Both trainings live in the same ranks and take turns of 10 steps, so that whatever else this machine does meets both. A
row has the medians of the turns' seconds a step, and their ratio. `loading`: milliseconds of the processor that a
sample takes to be read, as an image takes to be decoded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.run_job import run_job

RECIPE = """
model: {{use: mlp, inputs: {inputs}, hidden: [256, 256], classes: 10}}
dataset: {{use: tools.benchmark.reading.Samples, size: {inputs}, loading: {loading}}}
loss: {{use: cross_entropy}}
optimizer: {{use: sgd}}
schedule: {{use: constant, learning_rate: 1.0e-3}}
train: {{length: {steps} steps, batch: 64}}
callbacks: []
"""
CASES = [(64, 0.0, 0), (12288, 0.0, 0), (12288, 0.0, 1), (12288, 0.2, 0), (12288, 0.2, 1)]
TURN, TURNS, BEGIN = 10, 12, 10  # steps of a turn; turns; steps before the first


@dataclass(frozen=True, kw_only=True)
class Samples:
    """`size` random numbers a sample, and `loading` milliseconds of the processor."""

    size: int
    loading: float

    def build(self, split: str) -> Any:
        return Read(self) if split == "train" else None


class Read:
    def __init__(self, settings: Samples):
        self.settings = settings

    def __len__(self) -> int:
        return 64 * (BEGIN + TURN * TURNS)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        end = time.thread_time() + self.settings.loading / 1e3
        while time.thread_time() < end:
            pass
        return np.full(self.settings.size, index % 10, "float32"), np.int64(index % 10)


def measure(recipe: Any, options: dict[str, Any]) -> None:
    """In every rank: trains the recipe with both readings in turns; rank 0 writes seconds a step."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe

    mesh = join(seed=0)
    trainers = {}
    for reading in ("each", "scatter"):
        words = [f"dataset.reading={reading}", f"output_dir={options['folder']}/{reading}"]
        words += [f"loader.num_workers={options['workers']}"]
        trainers[reading] = build(read_recipe(Path(options["recipe"]), words), mesh)
    seconds: dict[str, list[float]] = {reading: [] for reading in trainers}
    streams = {reading: trainer.loader.read(0) for reading, trainer in trainers.items()}
    for turn in range(TURNS + 1):
        for reading, trainer in trainers.items():
            mesh.sum([0.0])
            began = time.perf_counter()
            for _ in range(TURN if turn else BEGIN):
                trainer.learner.train_batch(next(streams[reading]))
            mesh.sum([0.0])
            if turn:
                seconds[reading].append((time.perf_counter() - began) / TURN)
    if mesh.is_main:
        Path(options["folder"], "seconds.json").write_text(json.dumps(seconds))
    for trainer in trainers.values():
        trainer.loader.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    print("| floats a sample | loading, ms | workers | each, ms a step | scatter, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for inputs, loading, workers in CASES:
        with tempfile.TemporaryDirectory(prefix="reading-") as folder:
            recipe = Path(folder, "recipe.yaml")
            recipe.write_text(RECIPE.format(inputs=inputs, loading=loading, steps=1))
            extra = {"folder": folder, "workers": workers, "recipe": str(recipe)}
            run_job("tools.benchmark.reading:measure", recipe, given.ranks, folder, extra=extra)
            seconds = json.loads(Path(folder, "seconds.json").read_text())
        each, scatter = (1e3 * statistics.median(seconds[reading]) for reading in ("each", "scatter"))
        turns = zip(seconds["scatter"], seconds["each"], strict=True)
        ratio = statistics.median(a / b for a, b in turns)
        print(
            f"| {inputs} | {loading:g} | {workers} | {each:.2f} | {scatter:.2f} | {ratio:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
