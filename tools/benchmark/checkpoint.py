"""Measures for how long training stands still for a checkpoint that is written at once, and for one in the background.

    python tools/benchmark/checkpoint.py --megabytes 500
    python -m paddle.distributed.launch --nproc_per_node 2 tools/benchmark/checkpoint.py --megabytes 500

The same training is done in turns without checkpoints, with `checkpoint: {async: false}` and with `{async: true}`,
round after round. A checkpoint of a perceptron under AdamW holds its weights and two moments of each.
"stalled" is what metrics.jsonl calls seconds_stalled: the checks, the copy and all that the training waits for.
"loop" is what a checkpoint adds to the time of the whole loop, so also what the thread in the background takes away
from training.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.benchmark.compute import one_thread

os.environ.update(one_thread())

import numpy as np
import paddle
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.mesh import join
from paddle_dp.train import Callback, Moment

WIDTH = 1024


class Noise:
    """Samples float32 [WIDTH] in ten classes."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> tuple[np.ndarray, np.int64]:
        return np.random.default_rng(i).standard_normal(WIDTH).astype("float32"), np.int64(i % 10)


class Clock(Callback):
    """The time of each step, and the numbers of each save."""

    reads = False

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.saves: list[dict[str, float]] = []

    def step(self, moment: Moment) -> None:
        self.steps.append(time.perf_counter())

    def saved(self, moment: Moment, path: Path) -> None:
        size = sum(file.stat().st_size for file in path.iterdir())
        self.saves.append({**moment.numbers, "bytes": size})


def trained(folder: str, layers: int, every: int, saves: int, kind: bool | None) -> tuple[float, Clock]:
    """Seconds from the first step to the last, and what was seen. `kind`: whether to save in the background."""
    paddle.seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)), nn.Linear(WIDTH, 10))
    save = {"use": "checkpoint", "every": f"{every} steps", "keep": 1, "async": bool(kind)}
    clock = Clock()
    trainer = Trainer.of(
        model=model,
        loss={"use": "cross_entropy"},
        optimizer="adamw",
        schedule={"use": "constant", "learning_rate": 1e-4},
        train=Noise(),
        batch=2,
        callbacks=[] if kind is None else [save],
        folder=folder,
        length=f"{every * (saves + 1) - 1} steps",
    )
    trainer.add(clock)
    trainer.fit()
    return clock.steps[-1] - clock.steps[0], clock


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=500, help="the size of a checkpoint")
    parser.add_argument("--every", type=int, default=25, help="steps from one to the next")
    parser.add_argument(
        "--saves", type=int, default=3, help="checkpoints in a round, without that at the end"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary folder by default")
    given = parser.parse_args()
    layers = max(round(given.megabytes * 1e6 / (12 * WIDTH * WIDTH)), 1)
    mesh = join()
    chosen = given.folder or Path(tempfile.gettempdir()) / "paddle_dp-benchmark-checkpoint"
    rows: dict[bool | None, list[dict[str, Any]]] = {None: [], False: [], True: []}
    loops: dict[bool | None, list[float]] = {None: [], False: [], True: []}
    for number in range(given.rounds):
        for kind in (None, False, True):
            folder = chosen / f"{number}-{kind}"
            seconds, clock = trained(str(folder), layers, given.every, given.saves, kind)
            loops[kind].append(seconds)
            rows[kind] += clock.saves[: given.saves]  # the last one is written at once, whatever is asked for
            mesh.wait("all done")
            if mesh.is_main:
                shutil.rmtree(folder, ignore_errors=True)
    if not mesh.is_main:
        return
    stalled, added = dict[bool, list[float]](), dict[bool, float]()
    for kind in (False, True):
        title = "in the background" if kind else "at once"
        for row in rows[kind]:
            print(
                f"{title}: {row['bytes'] / 1e6:.0f} MB, stalled {row['seconds_stalled']:.3f} s, of these waiting "
                f"{row['seconds_waiting']:.3f} s; written in {row['seconds_writing']:.3f} s"
            )
        stalled[kind] = [row["seconds_stalled"] for row in rows[kind]]
        longer = [other - none for other, none in zip(loops[kind], loops[None], strict=True)]
        added[kind] = statistics.median(longer) / given.saves
    once, back = (statistics.median(stalled[kind]) for kind in (False, True))
    print(
        f"{mesh.ranks} rank{'s' * (mesh.ranks > 1)}, medians: stalled {back:.3f} s in the background, {once:.3f} s at "
        f"once: {back / once:.1%}; the slowest {max(stalled[True]):.3f} s: {max(stalled[True]) / once:.1%}"
    )
    print(
        f"loop: a checkpoint adds {added[True]:.3f} s in the background, {added[False]:.3f} s at once; a step takes "
        f"{min(loops[None]) / (given.every * (given.saves + 1) - 2):.3f} s"
    )


if __name__ == "__main__":
    main()
