"""Measures the cost of checking weights and optimizer states, compared with an update and a checkpoint.

    python -m paddle.distributed.launch --nproc_per_node 2 tools/check_cost.py [MILLIONS]

A model of MILLIONS of parameters (default 25) under AdamW is checked as before every save: digests of weights and
optimizer states are compared over the ranks, and all numbers must be finite. Then it is saved. Prints medians of five;
of updates with and without a guard, done in turn, the least of 15.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import paddle
from paddle import nn

from paddle_dp import checkpoint
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.mesh import join
from tools.benchmark.turns import in_turns


class Points:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.full(1000, index / 64, "float32"), index % 10


def learn(trainer: Trainer, guarded: bool = False) -> None:
    """An epoch's updates."""
    for batch in trainer.loader.read(0):
        trainer.learner.train_batch(batch, approve=(lambda metrics: True) if guarded else None)


def seconds(work: Callable[[], object], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main(millions: int) -> None:
    mesh = join(seed=0)
    paddle.seed(0)
    layers = [nn.Linear(1000, 1000) for _ in range(millions)]
    with tempfile.TemporaryDirectory() as name:
        trainer = Trainer.of(
            model=nn.Sequential(*layers, nn.Linear(1000, 10)), loss="cross_entropy", optimizer="adamw", batch=32,
            train=Points(), schedule={"use": "constant", "learning_rate": 1e-4}, length="2 steps", callbacks=[],
            folder=f"{name}/run",
        )  # fmt: skip
        trainer.fit()
        folder = trainer.run.folder / "checkpoints"  # the first rank's
        weights = seconds(lambda: trainer.check("now"))
        with_states = seconds(lambda: trainer.check("now", states=True))
        saved = seconds(lambda: checkpoint.save(trainer.snapshot(), folder, mesh)) - with_states
        taken = in_turns({guarded: partial(learn, trainer, guarded) for guarded in (False, True)}, 15, 1)
        # An epoch has two updates, and other work only adds to their seconds.
        update, guarded = (min(epochs) / 2 for epochs in taken.values())
    if mesh.is_main:
        size = sum(p.size for p in trainer.learner.model.parameters())
        print(
            f"{size / 1e6:.1f} million parameters, {mesh.ranks} ranks, {mesh.device}; update {update * 1e3:.0f} ms"
        )
        print(f"update under a guard         {guarded * 1e3:7.1f} ms")
        print(f"check of the weights         {weights * 1e3:7.1f} ms, {weights / update:.1%} of an update")
        print(
            f"check of weights and states  {with_states * 1e3:7.1f} ms, {with_states / saved:.1%} of a save"
        )
        print(f"save                         {saved * 1e3:7.1f} ms")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
