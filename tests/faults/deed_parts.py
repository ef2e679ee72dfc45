"""Parts of the recipes of test_deeds.py: samples that name themselves, and processes that take too much memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from paddle import nn

from paddle_dp.losses.cross_entropy import CrossEntropy
from paddle_dp.train import Callback, Moment, Run
from tests.strategies.test_branches import Deep as BranchesDeep

ORDERS = os.environ.get("PADDLE_DP_DEED_ORDERS", "")
"""The folder in which a test leaves an order for a rank, or for any data worker."""
SAMPLES = 200


class Samples:
    """Samples drawn anew in each epoch from the seed that the loader sets; the target is the sample's number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        eat("worker")
        return np.random.standard_normal(64).astype("float32"), np.array(index)


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """`use: tests.faults.deed_parts.Numbered`."""

    def build(self, split: str) -> Samples:
        return Samples()


class Deep(BranchesDeep):
    """`use: tests.faults.deed_parts.Deep`: with as many classes as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(6, SAMPLES)


class RecordedLoss(CrossEntropy):
    """Its score `record` is the mean of the samples' numbers, whatever the weights are: of two updates with the same
    record one has not lost a sample, or learned from it twice."""

    def scores(self, outputs: Any, targets: Any) -> dict[str, Any]:
        return {"record": targets.astype("float32").sum()}


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """`use: tests.faults.deed_parts.Recorded`."""

    def build(self) -> RecordedLoss:
        return RecordedLoss()


@dataclass(frozen=True, kw_only=True)
class Eats:
    """`use: tests.faults.deed_parts.Eats`: a rank that takes all memory of a control group, where it is ordered to."""

    def build(self, run: Run) -> Callback:
        return Eater()


class Eater(Callback):
    reads = False

    def step(self, moment: Moment) -> None:
        eat(f"rank-{moment.trainer.mesh.rank}")


def eat(who: str) -> None:
    """Obeys an order for `who`, once: its file names the control group to enter."""
    order = Path(ORDERS, f"eat.{who}")
    if not ORDERS or not order.exists():
        return
    try:
        order.rename(order.with_suffix(f".obeyed-{os.getpid()}"))
    except OSError:  # another worker obeys it
        return
    group = order.with_suffix(f".obeyed-{os.getpid()}").read_text()
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    eaten = []
    while True:
        eaten.append(np.ones(1 << 22))
