"""Adam with a learning rate for each layer, for large batches (You et al., arXiv:1904.00962)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paddle_dp.optimizers._base import Named, OptimizerConfig
from paddle_dp.units import AboveZero, Probability, Rate

if TYPE_CHECKING:
    from paddle.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    elementwise: ClassVar[bool] = False

    weight_decay: Rate = 0.01
    """`weight_decay` × weight is added to the update before it is scaled; biases and norms do not decay."""

    beta1: Probability = 0.9
    """Decay of the running mean of the gradient."""

    beta2: Probability = 0.999
    """Decay of the running mean of the squared gradient."""

    epsilon: AboveZero = 1e-6
    """Added to the square root in the denominator."""

    always_adapt: bool = False
    """Adapt the rate of parameters that do not decay, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weight_decay and not self.always_adapt:
            # paddle.optimizer.Lamb adapts only parameters that decay: without decay it is Adam.
            raise ValueError("weight_decay: without it no layer's rate is adapted; set always_adapt: true")

    def build(self, learning_rate: Any, named_parameters: Named) -> Optimizer:
        from paddle.optimizer import Lamb

        decaying = {parameter.name for parameter in self.decaying(named_parameters)}
        return Lamb(
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            lamb_weight_decay=float(self.weight_decay),
            always_adapt=self.always_adapt,
            exclude_from_weight_decay_fn=lambda parameter: parameter.name not in decaying,
            **self.shared(learning_rate, named_parameters),
        )
