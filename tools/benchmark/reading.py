"""Measures what it costs that rank 0 reads for all (dataset.reading: scatter), beside each rank reading, in one job.

    python tools/benchmark/reading.py                        # 2 ranks, small samples and images, 0 and 1 data workers
    python tools/benchmark/reading.py --ranks 3

Both trainings live in the same ranks and take turns of 10 steps, so that whatever else this machine does meets both. A
row has the medians of the turns' seconds a step, and their ratio. `loading`: milliseconds of the processor that a
sample takes to be read, as an image takes to be decoded.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.turns import ratio, seconds_of_job
from tools.command_line import parser_of
from tools.tables import table_head, table_row

RECIPE = """
model: {{use: mlp, inputs: {inputs}, hidden: [256, 256], classes: 10}}
dataset: {{use: tools.benchmark.reading.Samples, size: {inputs}, loading: {loading}}}
loss: {{use: cross_entropy}}
optimizer: {{use: sgd}}
schedule: {{use: constant, learning_rate: 1.0e-3}}
train: {{length: 1 steps, batch: 64}}
callbacks: []
"""
CASES = [(64, 0.0, 0), (12288, 0.0, 0), (12288, 0.0, 1), (12288, 0.2, 0), (12288, 0.2, 1)]
TURN, TURNS = 10, 12  # steps of a turn; turns that count


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
        return 64 * TURN * (1 + TURNS)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        end = time.thread_time() + self.settings.loading / 1e3
        while time.thread_time() < end:
            pass
        return np.full(self.settings.size, index % 10, "float32"), np.int64(index % 10)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_args()
    print(
        table_head(["floats a sample", "loading, ms", "workers", "each, ms a step", "scatter, ms", "ratio"])
    )
    for inputs, loading, workers in CASES:
        with tempfile.TemporaryDirectory(prefix="reading-") as folder:
            recipe = Path(folder, "recipe.yaml")
            recipe.write_text(RECIPE.format(inputs=inputs, loading=loading))
            trainers = {
                reading: [f"dataset.reading={reading}", f"loader.num_workers={workers}"]
                for reading in ("each", "scatter")
            }
            seconds = seconds_of_job(recipe, given.ranks, trainers, TURN, TURNS)
        each, scatter = (f"{1e3 * statistics.median(times):.2f}" for times in seconds.values())
        compared = f"{ratio(seconds['scatter'], seconds['each']):.2f}"
        print(table_row([inputs, f"{loading:g}", workers, each, scatter, compared]), flush=True)


if __name__ == "__main__":
    main()
