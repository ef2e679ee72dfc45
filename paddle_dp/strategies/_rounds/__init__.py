"""Ranks that learn alone for a period and then meet: the parts that `local_sgd` and `async_average` share.

`periods` says when ranks meet, `periodic_means` averages their weights, or steps by such a mean. Rounds of the training
loop are in `train.rounds`. `AveragedLayout` counts what such a rank has and sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paddle_dp.plan.layout import Blocks, Layout, RankMemory, Sent, Weight


@dataclass(frozen=True, kw_only=True)
class AveragedLayout(Layout):
    """Weights are sent once in `every` steps, instead of each step's gradients; with `states` the optimizer states,
    too. `copies`: further copies of the trained weights that a rank keeps."""

    every: int
    states: bool = False
    copies: float = 0.0

    @property
    def extra_label(self) -> str:
        return "copies of the weights"

    def exchange_state(self, weights: Sequence[Weight]) -> float:
        return self.copies * sum(weight.size for weight in weights) * self.widths.parameter

    def transfers(self, blocks: Blocks, memory: RankMemory) -> list[Sent]:
        """A ring's all-reduce (`plan.exchange`)."""
        ranks, width = self.degrees.data, self.widths.parameter + self.states * self.widths.optimizer
        size = 2 * (ranks - 1) / ranks * memory.trained * width / self.every
        mean = Sent(
            axis="data", payload="parameters", bytes=size, when="last backward", hides=self.asynchronous
        )
        return [mean] if size else []
