"""Measures a step of one process with copies of its model (strategy replicas), beside the same process without.

    python tools/benchmark/replicas.py                    # an MLP of 5 million parameters, batch 128, 1, 2 and 4 copies

All live in one process and take turns, so that whatever else this machine does meets them all. A row has the median of
the turns' milliseconds, the median of their ratios to one without copies, and the bytes of all weights.
"""

from __future__ import annotations

import os
import statistics
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.compute import one_thread

os.environ.update(one_thread())

import numpy as np
import paddle

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.learner import Learner, Task
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import Mesh
from paddle_dp.part import read_part
from tools.benchmark.turns import in_turns, ratio
from tools.tables import table_head, table_row

COUNTS, TURNS, STEPS, BATCH, WIDTH = (1, 2, 4), 12, 3, 128, 1024


def learner(count: int) -> Learner:
    paddle.seed(0)
    model = paddle.nn.Sequential(
        *(layer for _ in range(4) for layer in (paddle.nn.Linear(WIDTH, WIDTH), paddle.nn.GELU())),
        paddle.nn.Linear(WIDTH, 10),
    )
    task = Task(
        model=model,
        loss=CrossEntropy().build(),
        optimizer=lambda rate, named: paddle.optimizer.AdamW(1e-3, parameters=[p for _, p in named]),
    )
    words = {"use": "single"} if count == 1 else {"use": "replicas", "count": count}
    made: Learner = read_part("strategies", words).build(Mesh.alone()).place(task)
    return made


def main() -> None:
    random = np.random.default_rng(0)
    x = paddle.to_tensor(random.standard_normal((BATCH, WIDTH)).astype("float32"))
    batch = Batch((MicroBatch(x, paddle.to_tensor(random.integers(0, 10, BATCH)), BATCH),), BATCH, 0, 0)
    learners = {count: learner(count) for count in COUNTS}
    seconds = in_turns(
        {count: partial(each.train_batch, batch) for count, each in learners.items()}, TURNS, STEPS
    )
    size = sum(p.size * 4 for p in learners[1].model.parameters()) / 1e6
    print(table_head(["copies", "ms a step", "ratio", "weights, MB"]))
    for count, times in seconds.items():
        milliseconds = f"{1e3 * statistics.median(times):.0f}"
        print(table_row([count, milliseconds, f"{ratio(times, seconds[1]):.2f}", f"{count * size:.0f}"]))


if __name__ == "__main__":
    main()
