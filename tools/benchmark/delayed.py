"""A loss for benchmarks: cross-entropy that takes a while longer on one rank, as a slow machine does."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from paddle_dp.losses.cross_entropy import Config, CrossEntropy
from paddle_dp.mesh.environment import Environment
from paddle_dp.units import Duration


class Delayed(CrossEntropy):
    """`delay` seconds of sleep in each forward of one rank: it waits, and takes no core from others of this machine.

    All ranks have the same fields: a training that is not described alike on all of them would be refused.
    """

    def __init__(self, smoothing: float, rank: int, delay: float):
        super().__init__(smoothing)
        self.rank, self.delay = rank, delay

    def __call__(self, outputs: Any, targets: Any) -> Any:
        if not outputs.stop_gradient and Environment.read().rank == self.rank:  # not where it evaluates
            time.sleep(self.delay)
        return super().__call__(outputs, targets)


@dataclass(frozen=True, kw_only=True)
class DelayedCrossEntropy(Config):
    """`use: tools.benchmark.delayed.DelayedCrossEntropy`."""

    rank: int = 1
    """The slow rank."""

    delay: Duration = Duration.parse("0 s")
    """How much longer its forward takes."""

    def build(self) -> CrossEntropy:
        return Delayed(self.label_smoothing, self.rank, self.delay.seconds)
