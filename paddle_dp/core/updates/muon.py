"""Muon: momentum whose matrices are made orthogonal, and AdamW for all other parameters (Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon; `match_rms`: Liu et al., arXiv:2502.16982).

Parameters are marked on the whole model, before it is placed: a pipeline's stage may have no head to look for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_dp.core.updates.by_parameter import ByParameter, Shape, States, as_matrix, norm, shape_of
from paddle_dp.errors import Mistake, RecipeError, UsageError
from paddle_dp.part.groups import is_any_match, is_match, known_names, named_parameters
from paddle_dp.text import few

_MARK = "hidden_matrix"  # in a parameter's optimize_attr, next to Paddle's learning_rate
_LAYERS = (nn.Linear, nn.Conv1D, nn.Conv2D, nn.Conv3D)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of X, X Xᵀ X and X (Xᵀ X)²: singular values go near 1 quickly
_TINY = 1e-7


class Muon(ByParameter):
    """moment ← momentum · moment + (1 − momentum) · gradient, and of each hidden matrix
    weight ← weight − rate · decay · weight − rate · scale · O, with O the matrix near U Vᵀ for
    U S Vᵀ = (1 − momentum) · gradient + momentum · moment (without `nesterov`: the moment).

    `scale` is √max(1, outputs / inputs), or with `match_rms` 0.2 · √max(outputs, inputs). All other parameters have
    AdamW's update, at `adamw_lr_scale` times the rate.
    """

    def __init__(self, settings: Any, **shared: Any):
        super().__init__(settings, **shared)
        if unmarked := [p for p in shared["parameters"] if _MARK not in p.optimize_attr]:
            raise UsageError(
                f"optimizer: parameter '{unmarked[0].name}' is not marked as a hidden matrix or another parameter: "
                "call the optimizer's `prepare(model)` on the whole model before."
            )

    def state_shapes(self, parameter: Tensor) -> dict[str, Shape]:
        shape = shape_of(parameter)
        if is_hidden_matrix(parameter):
            return {"moment": shape}
        return {"moment1": shape, "moment2": shape, "steps": (1,)}

    def update(
        self, parameter: Tensor, weight: Tensor, gradient: Tensor, rate: float, states: States
    ) -> None:
        if is_hidden_matrix(parameter):
            step = self._orthogonal_step(gradient, states["moment"])
        else:
            rate = rate * self.settings.adamw_lr_scale
            step = self._adamw_step(gradient, states)
        if decay := self.decay_of(parameter):
            weight.scale_(1 - rate * decay)
        weight.subtract_(step * rate)

    def _orthogonal_step(self, gradient: Tensor, moment: Tensor) -> Tensor:
        moment.scale_(self.settings.momentum).add_(gradient * (1 - self.settings.momentum))
        mean = (
            gradient * (1 - self.settings.momentum) + moment * self.settings.momentum
            if self.settings.nesterov
            else moment
        )
        matrix = as_matrix(mean)
        rows, columns = matrix.shape
        # A Linear's weight is [inputs, outputs], a convolution's [outputs, inputs …].
        outputs, inputs = (columns, rows) if gradient.ndim == 2 else (rows, columns)
        scale = (
            0.2 * max(outputs, inputs) ** 0.5
            if self.settings.scale == "match_rms"
            else max(1.0, outputs / inputs) ** 0.5
        )
        return orthogonalized(matrix, self.settings.iterations).reshape(gradient.shape) * scale

    def _adamw_step(self, gradient: Tensor, states: States) -> Tensor:
        steps = states["steps"].add_(paddle.ones_like(states["steps"]))
        first = states["moment1"].scale_(self.settings.beta1).add_(gradient * (1 - self.settings.beta1))
        second = (
            states["moment2"].scale_(self.settings.beta2).add_(gradient.square() * (1 - self.settings.beta2))
        )
        root = (second / (1 - self.settings.beta2**steps)).sqrt() + self.settings.epsilon
        return first / (1 - self.settings.beta1**steps) / root


def orthogonalized(matrix: Tensor, iterations: int) -> Tensor:
    """U Vᵀ of a matrix U S Vᵀ, nearly: the iteration of Newton and Schulz, a polynomial of the singular values."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (norm(x) + _TINY)
    a, b, c = NEWTON_SCHULZ
    for _ in range(iterations):
        square = paddle.matmul(x, x, transpose_y=True)
        x = x * a + paddle.matmul(square * b + paddle.matmul(square, square) * c, x)
    return x.T if is_tall else x


def is_hidden_matrix(parameter: Tensor) -> bool:
    """Whether `mark` has marked a parameter as a hidden matrix."""
    return bool(parameter.optimize_attr[_MARK])


def mark(model: nn.Layer, adamw: Sequence[str] | None) -> None:
    """Marks each parameter of a whole model as a hidden matrix, the weight of a Linear or a convolution or a LoRA
    factor, or as another one. `adamw`: patterns of parameters and layers that are none; None: the last of those layers,
    as a rule the head, unless the scores come from a weight that an embedding shares.

    A weight that an embedding shares is none. Raises RecipeError for a pattern that matches nothing.
    """
    layers = dict(model.named_sublayers(include_self=True))
    named = named_parameters(model)
    linears = [name for name, layer in layers.items() if isinstance(layer, _LAYERS)]
    is_tied = any(len(names) > 1 and _embeds(layers, names) for names, _ in named)
    patterns = (() if is_tied else linears[-1:]) if adamw is None else adamw
    _check_patterns(adamw or (), [names for names, _ in named])
    for names, parameter in named:
        hidden = (
            parameter.ndim >= 2
            and all(isinstance(layers[name.rpartition(".")[0]], _LAYERS) for name in names)
            and not is_any_match(patterns, names)
        )
        parameter.optimize_attr = {**parameter.optimize_attr, _MARK: hidden}


def _embeds(layers: Mapping[str, nn.Layer], names: Sequence[str]) -> bool:
    """Whether one of these names of a parameter is an embedding's."""
    return any(isinstance(layers[name.rpartition(".")[0]], nn.Embedding) for name in names)


def describe(model: nn.Layer) -> list[str]:
    """A line on the hidden matrices of a marked model, and one on its other trained parameters."""
    trained = [(name, p) for name, p in model.named_parameters() if not p.stop_gradient]
    kinds = {kind: [name for name, p in trained if is_hidden_matrix(p) is kind] for kind in (True, False)}
    return [
        f"muon makes the updates of {len(kinds[True])} matrices orthogonal: {few(kinds[True], 4)}",
        f"AdamW updates the other {len(kinds[False])} parameters: {few(kinds[False], 4)}",
    ]


def _check_patterns(patterns: Sequence[str], named: Sequence[Sequence[str]]) -> None:
    mistakes = [
        Mistake(
            where="",
            message=f"optimizer.adamw.{number}: '{pattern}' matches no parameter.{known_names(pattern, named)}",
            path=("optimizer", "adamw", number),
        )
        for number, pattern in enumerate(patterns)
        if not any(is_match(pattern, names) for names in named)
    ]
    if mistakes:
        raise RecipeError(mistakes)
