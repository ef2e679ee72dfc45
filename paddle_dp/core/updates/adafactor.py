"""Adafactor: Adam's second moment of a matrix as a row and a column (Shazeer and Stern, arXiv:1804.04235, algorithms 4
and 5, with a schedule for the relative step ρ)."""

from __future__ import annotations

import math

import paddle
from paddle import Tensor

from paddle_dp.core.updates.by_parameter import (
    ByParameter,
    Shape,
    States,
    as_matrix,
    root_mean_square,
    shape_of,
)


class Adafactor(ByParameter):
    """weight ← weight − ρ · decay · weight − ρ · max(ε₂, RMS(weight)) · u / max(1, RMS(u) / clip_update), where
    u = gradient / √v, and v is the running mean of gradient² + ε₁ with β₂ = 1 − t^−`decay_rate` in update t.

    A matrix [rows, columns] keeps means over its rows and columns, v = row · column / mean(row), a vector all of v.
    `relative`: whether steps are multiplied by the weight's root mean square.
    """

    def state_shapes(self, parameter: Tensor) -> dict[str, Shape]:
        shape = shape_of(parameter)
        if len(shape) < 2:
            return {"steps": (1,), "square": shape}
        return {"steps": (1,), "row": shape[:1], "column": (math.prod(shape[1:]),)}

    def update(
        self, parameter: Tensor, weight: Tensor, gradient: Tensor, rate: float, states: States
    ) -> None:
        steps = states["steps"].add_(paddle.ones_like(states["steps"]))
        # steps^-decay_rate = 1 − β₂; Paddle's power would round the exponent to float32.
        share = paddle.exp(steps.log() * -self.settings.decay_rate)
        square = gradient.square() + self.settings.epsilon1
        if "square" in states:
            _move(states["square"], square, share)
            direction = gradient / states["square"].sqrt()
        else:
            row, column, matrix = states["row"], states["column"], as_matrix(square)
            _move(row, matrix.mean(1), share)
            _move(column, matrix.mean(0), share)
            roots = (row / row.mean()).sqrt().unsqueeze(1) * column.sqrt()
            direction = (as_matrix(gradient) / roots).reshape(gradient.shape)
        bound = paddle.clip(root_mean_square(direction) / self.settings.clip_update, min=1.0)
        step = direction * (rate / bound)
        if self.settings.relative:
            step = step * paddle.clip(root_mean_square(weight), min=self.settings.epsilon2)
        if decay := self.decay_of(parameter):
            weight.scale_(1 - rate * decay)
        weight.subtract_(step)


def _move(mean: Tensor, value: Tensor, share: Tensor) -> None:
    """Moves a running mean by a share of its distance to a value."""
    mean.add_((value - mean) * share)
