"""LARS: momentum with a learning rate for each layer, for large batches (You et al., arXiv:1708.03888)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paddle_dp.optimizers._base import Named, OptimizerConfig
from paddle_dp.units import AboveZero, Probability, Rate

if TYPE_CHECKING:
    from paddle.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """The step of a layer is `trust` × |weight| / (|gradient| + `weight_decay` × |weight|) times momentum's."""

    elementwise: ClassVar[bool] = False
    states: ClassVar[int] = 1

    weight_decay: Rate = 1e-4
    """`weight_decay` × weight is added to the clipped gradient; biases and norms do not decay."""

    momentum: Probability = 0.9
    """Decay of the velocity."""

    trust: AboveZero = 0.001
    """Length of a layer's step at learning rate 1, as a share of its weight's norm."""

    always_adapt: bool = False
    """Adapt the rate of parameters that do not decay, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weight_decay and not self.always_adapt:
            raise ValueError("weight_decay: without it no layer's rate is adapted; set always_adapt: true")

    def build(self, learning_rate: Any, named_parameters: Named) -> Optimizer:
        from paddle_dp.core.updates import Lars

        return Lars(self, **self.by_parameter(learning_rate, named_parameters))
