"""Parts of a recipe that stand still on one rank, wherever the environment says: FAULT="WHERE RANK STEP"."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_dp.train import Callback, Moment, Run

WHERE, _RANK, _STEP = os.environ.get("FAULT", "nowhere -1 0").split()
HERE = os.environ.get("PADDLE_TRAINER_ID", "0") == _RANK
STEP = int(_STEP)
begun: list[int] = []  # not empty once the training has begun: samples are looked at before
STANDS_AT = {
    "train": 120,
    "test": 37,
}  # the how manieth sample that a rank reads, once the training has begun


def stand_still(*_: Any) -> None:
    while True:
        time.sleep(1)


if WHERE == "import" and HERE and "PADDLE_TRAINER_ID" in os.environ:
    stand_still()


class Samples:
    """200 samples, of which one is never read to its end."""

    def __init__(self, stands_at: int):
        self.stands_at, self.read = stands_at, 0

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.read += bool(begun)
        if self.read == self.stands_at:
            stand_still()
        return np.full([64], index / 200, "float32"), np.array(index % 10)


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """`use: tests.faults.hangs.Dataset`."""

    def build(self, split: str) -> Any:
        stands = HERE and {"train": "data", "test": "evaluate"}[split] == WHERE
        return Samples(STANDS_AT[split] if stands else -1)


@dataclass(frozen=True, kw_only=True)
class Hang:
    """`use: tests.faults.hangs.Hang`: makes what the trainer is made of stand still, and stands still itself."""

    def build(self, run: Run) -> Callback:
        return Hanging()


class Hanging(Callback):
    reads = False

    def start(self, moment: Moment) -> None:
        begun.append(moment.progress.step)
        self._is_now("callback start")
        if not HERE:
            return
        learner = moment.trainer.learner
        if WHERE == "forward":
            learner.model.register_forward_pre_hook(_from_step(moment))
        if WHERE == "backward":
            learner.trainable[0].register_hook(_from_step(moment))
        if WHERE == "exchange":
            learner._all_reduce_gradients = _from_step(moment, learner._all_reduce_gradients)
        if WHERE == "update":
            learner._step = _from_step(moment, learner._step)
        if WHERE == "checkpoint":
            from paddle_dp.checkpoint import saving

            saving._write_rank = stand_still

    def step(self, moment: Moment) -> None:
        if moment.progress.step == STEP:
            self._is_now("callback step")

    def epoch(self, moment: Moment) -> None:
        self._is_now("callback epoch")

    def end(self, moment: Moment) -> None:
        self._is_now("callback end")
        if HERE and WHERE == "atexit":
            atexit.register(stand_still)
        if HERE and WHERE == "thread":
            threading.Thread(target=stand_still, name="left running").start()

    def _is_now(self, where: str) -> None:
        if HERE and where.replace(" ", "-") == WHERE:
            stand_still()


def _from_step(moment: Moment, until_then: Callable[[], None] = lambda: None) -> Any:
    trainer = moment.trainer

    def stand(*_: Any) -> None:
        if trainer.progress.step >= STEP:  # type: ignore[attr-defined]
            stand_still()
        until_then()

    return stand
