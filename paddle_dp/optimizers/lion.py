"""Lion: steps of one size by the sign of a momentum, with half of AdamW's states (Chen et al., arXiv:2302.06675)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paddle_dp.optimizers._base import Named, OptimizerConfig
from paddle_dp.units import Probability, Rate

if TYPE_CHECKING:
    from paddle.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """The paper takes a learning rate 3 to 10 times smaller than AdamW's, and a decay as many times larger."""

    states: ClassVar[int] = 1

    weight_decay: Rate = 0.1
    """Each update also subtracts learning rate × `weight_decay` × weight; biases and norms do not decay."""

    beta1: Probability = 0.9
    """Share of the moment in the sum with the gradient whose sign is the step."""

    beta2: Probability = 0.99
    """Decay of the running mean of the gradient."""

    def build(self, learning_rate: Any, named_parameters: Named) -> Optimizer:
        from paddle_dp.core.updates import Lion

        return Lion(self, **self.by_parameter(learning_rate, named_parameters))
