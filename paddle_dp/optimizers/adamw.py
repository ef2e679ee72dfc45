"""Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddle_dp.optimizers._base import Named, OptimizerConfig
from paddle_dp.units import AboveZero, Probability, Rate

if TYPE_CHECKING:
    from paddle.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    weight_decay: Rate = 0.01
    """Each update first subtracts learning rate × `weight_decay` × weight; biases and norms do not decay."""

    beta1: Probability = 0.9
    """Decay of the running mean of the gradient."""

    beta2: Probability = 0.999
    """Decay of the running mean of the squared gradient."""

    epsilon: AboveZero = 1e-8
    """Added to the square root in the denominator."""

    def build(self, learning_rate: Any, named_parameters: Named) -> Optimizer:
        from paddle.optimizer import AdamW

        decaying = {parameter.name for parameter in self.decaying(named_parameters)}
        return AdamW(
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            weight_decay=float(self.weight_decay),
            apply_decay_param_fun=decaying.__contains__,
            **self.shared(learning_rate, named_parameters),
        )
