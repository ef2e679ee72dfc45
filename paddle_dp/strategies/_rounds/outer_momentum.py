"""The outer optimizer of DiLoCo (Douillard et al. 2023, arXiv:2311.08105): the ranks' mean step is its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import paddle


@dataclass(kw_only=True)
class OuterMomentum:
    """velocity = momentum · velocity + gradient.

    The step is `learning_rate` × velocity, or with `nesterov` × (gradient + momentum · velocity). The gradient is the
    weights at the period's start minus the ranks' weighted mean.
    """

    learning_rate: float
    momentum: float
    nesterov: bool
    velocity: list[paddle.Tensor] = field(default_factory=list, init=False)  # empty before the first step

    def begin(self, weights: Sequence[paddle.Tensor]) -> None:
        """Initializes the velocities of these weights with 0, unless they exist."""
        if not self.velocity:
            self.velocity = [paddle.zeros_like(weight) for weight in weights]

    def step(self, index: int, gradient: paddle.Tensor) -> paddle.Tensor:
        """The step to subtract from parameter `index`."""
        velocity = self.velocity[index]
        velocity.scale_(self.momentum)
        velocity.add_(gradient)
        return (gradient + velocity * self.momentum if self.nesterov else velocity) * self.learning_rate
