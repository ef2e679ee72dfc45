"""Parts of a recipe that are slow on one rank, or on all (`rank: -1`): `use: tests.train.slow.Dataset` and `.Slow`."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from paddle_dp.train import Callback, Moment, Run

SECONDS = 0.03


def is_here(rank: int) -> bool:
    return rank in (-1, int(os.environ.get("PADDLE_TRAINER_ID", "0")))


class Dataset:
    """480 samples of 64 numbers, each of which takes long where `where` is data."""

    def __init__(self, split: str, rank: int, where: str):
        self.seconds = SECONDS / 6 if where == "data" and is_here(rank) else 0.0

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self.seconds)
        return np.full([64], index / 480, "float32"), np.array(index % 10)


class Slow(Callback):
    """Makes the forward or the update take long."""

    reads = False

    def __init__(self, run: Run, rank: int, where: str):
        self.rank, self.where = rank, where

    def start(self, moment: Moment) -> None:
        learner: Any = moment.trainer.learner
        if not is_here(self.rank):
            return
        if self.where == "forward":
            for layer in learner.model.sublayers()[:1]:
                layer.register_forward_pre_hook(lambda *_: time.sleep(SECONDS))
        if self.where == "update":
            step = learner.update
            learner.update = lambda: (time.sleep(SECONDS), step())[1]
