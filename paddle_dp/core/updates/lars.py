"""LARS: momentum with a learning rate for each layer, for large batches (You et al., arXiv:1708.03888, algorithm 1).

Paddle's LarsMomentumOptimizer (3.3.1) is not used: outside static programs it updates the 16-bit weight and leaves its
float32 copy behind, it leaves parameters out of the decay by parts of their names in this process, and a weight that
begins as zeros (LoRA's B) gets rate 0 and never moves.
"""

from __future__ import annotations

import paddle
from paddle import Tensor

from paddle_dp.core.updates.by_parameter import ByParameter, Shape, States, norm, shape_of


class Lars(ByParameter):
    """velocity ← momentum · velocity + rate · λ · (gradient + decay · weight); weight ← weight − velocity.

    λ = trust · |weight| / (|gradient| + decay · |weight|) for parameters that decay (`always_adapt`: for all), and 1
    for the others and for weights of zeros.
    """

    def state_shapes(self, parameter: Tensor) -> dict[str, Shape]:
        return {"velocity": shape_of(parameter)}

    def update(
        self, parameter: Tensor, weight: Tensor, gradient: Tensor, rate: float, states: States
    ) -> None:
        velocity, decay = states["velocity"], self.decay_of(parameter)
        step = (gradient + weight * decay if decay else gradient) * rate
        if decay or self.settings.always_adapt:
            weight_norm = norm(weight)
            bound = norm(gradient) + weight_norm * decay
            adapted = (weight_norm > 0).logical_and(bound > 0)
            step = step * paddle.where(
                adapted, weight_norm * self.settings.trust / bound, paddle.ones_like(bound)
            )
        velocity.scale_(self.settings.momentum).add_(step)
        weight.subtract_(velocity)
