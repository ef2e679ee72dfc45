"""Plain gradient descent, with L2 decay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paddle_dp.optimizers._base import Named, OptimizerConfig

if TYPE_CHECKING:
    from paddle.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """`weight_decay` × weight is added to the clipped gradient."""

    states: ClassVar[int] = 0

    def build(self, learning_rate: Any, named_parameters: Named) -> Optimizer:
        from paddle.optimizer import SGD

        self.decay_by_regularizer(named_parameters)
        return SGD(**self.shared(learning_rate, named_parameters))
