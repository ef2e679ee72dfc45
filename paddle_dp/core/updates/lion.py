"""Lion: steps of one size, by the sign of a momentum (Chen et al., arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

import paddle
from paddle import Tensor

from paddle_dp.core.updates.by_parameter import ByParameter, Shape, States, shape_of


class Lion(ByParameter):
    """weight ← weight − rate · (sign(β₁ moment + (1 − β₁) gradient) + decay · weight), then
    moment ← β₂ moment + (1 − β₂) gradient."""

    def state_shapes(self, parameter: Tensor) -> dict[str, Shape]:
        return {"moment": shape_of(parameter)}

    def update(
        self, parameter: Tensor, weight: Tensor, gradient: Tensor, rate: float, states: States
    ) -> None:
        moment = states["moment"]
        direction = paddle.sign(moment * self.settings.beta1 + gradient * (1 - self.settings.beta1))
        if decay := self.decay_of(parameter):
            weight.scale_(1 - rate * decay)
        weight.subtract_(direction * rate)
        moment.scale_(self.settings.beta2).add_(gradient * (1 - self.settings.beta2))
