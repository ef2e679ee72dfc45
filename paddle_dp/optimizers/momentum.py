"""Gradient descent with momentum (optionally Nesterov's) and L2 decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paddle_dp.optimizers._base import Named, OptimizerConfig
from paddle_dp.units import Probability

if TYPE_CHECKING:
    from paddle.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """velocity = momentum × velocity + gradient; `weight_decay` × weight is added to the clipped gradient."""

    states: ClassVar[int] = 1

    momentum: Probability = 0.9
    """Decay of the velocity."""

    nesterov: bool = False
    """Nesterov momentum."""

    def build(self, learning_rate: Any, named_parameters: Named) -> Optimizer:
        from paddle.optimizer import Momentum

        self.decay_by_regularizer(named_parameters)
        shared = self.shared(learning_rate, named_parameters)
        return Momentum(momentum=self.momentum, use_nesterov=self.nesterov, **shared)
