"""Optimizers that Paddle lacks, in plain tensor operations: LARS, Lion, Adafactor, Muon.

The shelf `optimizers` has their settings. Their base updates one parameter after the other, each from its gradient and
its states alone; it has the states, float32 master weights and group decays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paddle
from paddle import Tensor, nn

from paddle_dp.errors import Mistake, RecipeError, UsageError
from paddle_dp.part.groups import is_any_match, is_match, known_names, named_parameters
from paddle_dp.text import few

Shape = tuple[int, ...]
States = Mapping[str, Tensor]
DECAY_KEY = "weight_decay"  # a group's, in a parameter's optimize_attr, next to Paddle's learning_rate


class ByParameter(paddle.optimizer.Optimizer):
    """A `paddle.optimizer.Optimizer` whose subclass gives the states of a parameter and its update.

    `settings`: the part's Config. Its `weight_decay` is for parameters whose name `decays` accepts; a group's decay
    replaces it. With `multi_precision` a weight in 16 bits has a float32 copy, which the update changes, and from which
    the weight is rounded; states have the copy's dtype. `shared`: the arguments of Paddle's optimizers.
    """

    def __init__(self, settings: Any, *, decays: Callable[[str], bool], multi_precision: bool, **shared: Any):
        super().__init__(**shared)
        self._multi_precision, self.settings = multi_precision, settings
        self._apply_decay_param_fun = decays  # AdamW's name: the comparison of trainings knows it

    def state_shapes(self, parameter: Tensor) -> dict[str, Shape]:
        """The shape of each state of a parameter, by name; states begin as zeros."""
        raise NotImplementedError

    def update(
        self, parameter: Tensor, weight: Tensor, gradient: Tensor, rate: float, states: States
    ) -> None:
        """Changes weight and states in place. `weight`: the parameter, or its float32 copy, in the dtype of `gradient`.
        `rate`: the parameter's learning rate."""
        raise NotImplementedError

    def decay_of(self, parameter: Tensor) -> float:
        """The weight decay of a parameter: its group's, or the optimizer's if it decays."""
        group_decay: float | None = parameter.optimize_attr.get(DECAY_KEY)
        if group_decay is not None:
            return group_decay
        return float(self.settings.weight_decay) if self._apply_decay_param_fun(parameter.name) else 0.0

    def _create_accumulators(self, block: Any, parameters: list[Tensor]) -> None:
        """Called by Paddle before an update, and before states are loaded."""
        for parameter in parameters:
            if parameter.name in self._already_create_accumulator:
                continue
            weight = self._create_master_weight(parameter) if self._has_master(parameter) else parameter
            for name, shape in self.state_shapes(parameter).items():
                self._add_accumulator(name, weight, shape=list(shape))
            self._already_create_accumulator.add(parameter.name)

    def _append_optimize_op(self, block: Any, pair: tuple[Tensor, Tensor]) -> None:
        """Called by Paddle for each (parameter, gradient), after the clip and without recording gradients."""
        parameter, gradient = pair
        if not parameter.size:
            return
        weight = self._master_weights[parameter.name] if self._has_master(parameter) else parameter
        names = self.state_shapes(parameter)
        states = {name: self._get_accumulator_master(name, parameter) for name in names}
        rate = self.get_lr() * parameter.optimize_attr["learning_rate"]
        self.update(parameter, weight, gradient.astype(weight.dtype), rate, states)
        if weight is not parameter:
            paddle.assign(weight.astype(parameter.dtype), parameter)

    def _has_master(self, parameter: Tensor) -> bool:
        return bool(self._multi_precision and self._is_dtype_fp16_or_bf16(parameter.dtype))


def shape_of(parameter: Tensor) -> Shape:
    return tuple(parameter.shape)


def as_matrix(tensor: Tensor) -> Tensor:
    """A matrix as it is; a tensor of more dims, such as a convolution's weight [out, in, …], as [out, in · …]."""
    return tensor if tensor.ndim == 2 else tensor.reshape([tensor.shape[0], -1])


def norm(tensor: Tensor) -> Tensor:
    """The 2-norm of all elements, as a tensor [] on the device."""
    return tensor.square().sum().sqrt()


def root_mean_square(tensor: Tensor) -> Tensor:
    """The root of the mean square of all elements, as a tensor [] on the device."""
    return tensor.square().mean().sqrt()


# LARS -----------------------------------------------------------------------------------------------------------------
# Momentum with a learning rate for each layer, for large batches (You et al., arXiv:1708.03888, algorithm 1).
#
# Paddle's LarsMomentumOptimizer (3.3.1) is not used: outside static programs it updates the 16-bit weight and leaves
# its float32 copy behind, it leaves parameters out of the decay by parts of their names in this process, and a weight
# that begins as zeros (LoRA's B) gets rate 0 and never moves.


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


# Lion -----------------------------------------------------------------------------------------------------------------
# Steps of one size, by the sign of a momentum (Chen et al., arXiv:2302.06675, algorithm 2).


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


# Adafactor ------------------------------------------------------------------------------------------------------------
# Adam's second moment of a matrix as a row and a column (Shazeer and Stern, arXiv:1804.04235, algorithms 4 and 5, with
# a schedule for the relative step ρ).


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
        steps = _counted(states["steps"])
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


def _counted(steps: Tensor) -> Tensor:
    """Adds this update to a count [1], and returns it as [], which every shape of parameter takes, [] too."""
    return steps.add_(paddle.ones_like(steps)).reshape([])


def _move(mean: Tensor, value: Tensor, share: Tensor) -> None:
    """Moves a running mean by a share of its distance to a value."""
    mean.add_((value - mean) * share)


# Muon -----------------------------------------------------------------------------------------------------------------
# Momentum whose matrices are made orthogonal, and AdamW for all other parameters (Jordan et al., 2024,
# https://kellerjordan.github.io/posts/muon; `match_rms`: Liu et al., arXiv:2502.16982).
#
# Parameters are marked on the whole model, before it is placed: a pipeline's stage may have no head to look for.

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
        steps = _counted(states["steps"])
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
