"""The base of the optimizers here: one update of one parameter, from its gradient and its states alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import paddle
from paddle import Tensor

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
