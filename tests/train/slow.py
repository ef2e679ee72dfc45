"""Parts of a recipe that are slow on one rank, or on all (`rank: -1`): `use: tests.train.slow.Dataset` and `.Slow`."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_dp.train import Callback, Moment, Run

SECONDS = 0.03


def is_here(rank: int) -> bool:
    return rank in (-1, int(os.environ.get("PADDLE_TRAINER_ID", "0")))


class Samples:
    """480 samples of 64 numbers."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def __len__(self) -> int:
        return 480

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(self.seconds)
        return np.full([64], index / 480, "float32"), np.array(index % 10)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Of which each sample takes long where `where` is data."""

    rank: int
    where: str

    def build(self, split: str) -> Samples:
        return Samples(SECONDS / 6 if self.where == "data" and is_here(self.rank) else 0.0)


@dataclass(frozen=True, kw_only=True)
class Slow:
    """Makes the forward or the update take long."""

    rank: int
    where: str

    def build(self, run: Run) -> Callback:
        return _Slow(self)


class _Slow(Callback):
    reads = False

    def __init__(self, config: Slow):
        self.config = config

    def start(self, moment: Moment) -> None:
        learner: Any = moment.trainer.learner
        if not is_here(self.config.rank):
            return
        if self.config.where == "forward":
            for layer in learner.model.sublayers()[:1]:
                layer.register_forward_pre_hook(lambda *_: time.sleep(SECONDS))
        if self.config.where == "update":
            step = learner.update
            learner.update = lambda: (time.sleep(SECONDS), step())[1]
