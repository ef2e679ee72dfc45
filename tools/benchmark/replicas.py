"""Measures a step of one process with copies of its model (strategy replicas), beside the same process without.

    python tools/benchmark/replicas.py                    # an MLP of 5 million parameters, batch 128, 1, 2 and 4 copies

All live in one process and take turns, so that whatever else this machine does meets them all. A row has the median of
the turns' milliseconds, the median of their ratios to one without copies, and the bytes of all weights.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.launch.machine import mkl_type

if kind := mkl_type():
    os.environ.setdefault("MKL_DEBUG_CPU_TYPE", kind)

import numpy as np
import paddle

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.learner import Learner, Task
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import Mesh
from paddle_dp.part import read_part

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
    seconds: dict[int, list[float]] = {count: [] for count in COUNTS}
    for turn in range(TURNS + 1):
        for count, each in learners.items():
            began = time.perf_counter()
            for _ in range(STEPS):
                each.train_batch(batch)
            if turn:
                seconds[count].append((time.perf_counter() - began) / STEPS)
    size = sum(p.size * 4 for p in learners[1].model.parameters()) / 1e6
    print("| copies | ms a step | ratio | weights, MB |\n|---|---|---|---|")
    for count in COUNTS:
        ratio = statistics.median(a / b for a, b in zip(seconds[count], seconds[1], strict=True))
        milliseconds = 1e3 * statistics.median(seconds[count])
        print(f"| {count} | {milliseconds:.0f} | {ratio:.2f} | {count * size:.0f} |")


if __name__ == "__main__":
    main()
