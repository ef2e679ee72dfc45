"""Parts of a recipe whose numbers go wrong: `use: tests.faults.numbers.Spoil`."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from typing import Any

import paddle

from paddle_dp.train import Callback, Moment, Run


@dataclass(frozen=True, kw_only=True)
class Spoil:
    """From update `step` + 1 on, in `times` forwards of rank `rank`, one number of a Linear is a bit wrong,
    or NaN."""

    rank: int = 1
    step: int = 6
    times: int = 10**9
    nan: bool = False

    def build(self, run: Run) -> Callback:
        return _Spoil(self)


class _Spoil(Callback):
    reads = False

    def __init__(self, config: Spoil):
        self.config, self.steps, self.done = config, 0, 0

    def start(self, moment: Moment) -> None:
        layers = [
            layer
            for _, layer in moment.trainer.learner.placed.named_layers()
            if type(layer).__name__ == "Linear"
        ]
        if int(os.environ.get("PADDLE_TRAINER_ID", "0")) == self.config.rank:
            layers[-1].register_forward_post_hook(self._spoiled)

    def step(self, moment: Moment) -> None:
        self.steps = moment.progress.step

    def _spoiled(self, layer: Any, inputs: Any, output: Any) -> Any:
        if self.steps < self.config.step or self.done >= self.config.times:
            return None
        if not self.done:
            print("the fault is at", time.time(), flush=True)
        self.done += 1
        factors = paddle.ones([output.size])
        factors[0] = math.nan if self.config.nan else 1 + 2.0**-16
        return output * factors.reshape(output.shape)
