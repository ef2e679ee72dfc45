"""Adafactor: Adam without momentum, with a row and a column of second moments (Shazeer and Stern, arXiv:1804.04235)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paddle_dp.optimizers._base import Named, OptimizerConfig
from paddle_dp.units import AboveZero

if TYPE_CHECKING:
    from paddle.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """Each update first subtracts learning rate × `weight_decay` × weight."""

    elementwise: ClassVar[bool] = False
    states: ClassVar[int] = 0  # a row and a column of a matrix: next to nothing

    decay_rate: AboveZero = 0.8
    """The mean of squared gradients forgets a share t^-`decay_rate` of itself in update t."""

    clip_update: AboveZero = 1.0
    """Upper bound of the root mean square of a parameter's step, before the learning rate."""

    relative: bool = True
    """Multiply the steps of a parameter by the root mean square of its weight, at least `epsilon2`."""

    epsilon1: AboveZero = 1e-30
    """Added to squared gradients."""

    epsilon2: AboveZero = 1e-3
    """Lower bound of a weight's root mean square."""

    def build(self, learning_rate: Any, named_parameters: Named) -> Optimizer:
        from paddle_dp.core.updates import Adafactor

        return Adafactor(self, **self.by_parameter(learning_rate, named_parameters))
