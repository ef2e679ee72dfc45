"""Adam with a rate of its own for every layer, for large batches (You et al., arXiv:1904.00962)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddle_dp.optimizers._base import AboveZero, Named, OptimizerConfig
from paddle_dp.units import Probability, Rate

if TYPE_CHECKING:
    from paddle.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    weight_decay: Rate = 0.01
    """Share of the weight that is added to the update before its size is set; not of biases and norms."""

    beta1: Probability = 0.9
    """How much of the gradient's mean is kept each step."""

    beta2: Probability = 0.999
    """How much of the squared gradient's mean is kept each step."""

    epsilon: AboveZero = 1e-6
    """Added to the root that the update is divided by."""

    always_adapt: bool = False
    """What does not decay gets a rate of its own, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.weight_decay and not self.always_adapt:
            # paddle.optimizer.Lamb takes «no decay» for «no adaptation»: it would silently be Adam.
            raise ValueError(
                "weight_decay: without it no layer gets a rate of its own; set always_adapt: true"
            )

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
