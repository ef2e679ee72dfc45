"""The base of the optimizers: selects the parameters that decay, and clips gradients.

Paddle's parameter groups are not used: `paddle.optimizer` clips each group by the group's norm, not by the global one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from paddle_dp.units import AboveZero, Rate

if TYPE_CHECKING:
    from paddle import Tensor
    from paddle.nn.clip import ClipGradBase

Named = Sequence[tuple[str, "Tensor"]]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    elementwise: ClassVar[bool] = True
    """Whether the update of a slice is the slice of the update: without it, no axis cuts tensors."""

    states: ClassVar[int] = 2
    """Numbers that it keeps per element of a parameter (moments, velocity), for `check` and `plan`; an upper bound."""

    weight_decay: Rate = 0.0
    """Strength of the decay of weights towards 0; biases and norms do not decay."""

    decay_all: bool = False
    """Decay biases and norms, too."""

    clip: AboveZero | None = None
    """Upper bound of the norm of all gradients together."""

    clip_value: AboveZero | None = None
    """Upper bound of each gradient element's absolute value."""

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip_value is not None:
            raise ValueError(
                "clip_value: give clip (norm of all gradients) or clip_value (each number), not both"
            )

    def shared(self, learning_rate: Any, named_parameters: Named) -> dict[str, Any]:
        """The arguments of every optimizer: rate, parameters, clip, float32 copies of weights in half precision."""
        from paddle import bfloat16, float16

        parameters = [parameter for _, parameter in named_parameters]
        return {
            "learning_rate": learning_rate,
            "parameters": parameters,
            "grad_clip": self._clip(),
            # Paddle checks it for every parameter at every step, 50 µs for a small model, so it is set only if needed.
            "multi_precision": any(parameter.dtype in (float16, bfloat16) for parameter in parameters),
        }

    def by_parameter(self, learning_rate: Any, named_parameters: Named) -> dict[str, Any]:
        """The arguments of the optimizers of `core.updates`."""
        decaying = {parameter.name for parameter in self.decaying(named_parameters)}
        return {"decays": decaying.__contains__, **self.shared(learning_rate, named_parameters)}

    def decaying(self, named_parameters: Named) -> list[Tensor]:
        """The parameters that decay: all, or those with two or more dims."""
        return [parameter for _, parameter in named_parameters if self.decay_all or parameter.ndim > 1]

    def decay_by_regularizer(self, named_parameters: Named) -> None:
        """Sets L2 decay as the regularizer of the parameters that decay; as exact as `weight_decay=`, which decays all.

        A regularizer that the model has set stays; one from an earlier call is replaced.
        """
        from paddle.regularizer import L2Decay

        decay = L2Decay(float(self.weight_decay))
        decay.from_recipe = True
        ours = [
            (name, p)
            for name, p in named_parameters
            if p.regularizer is None or hasattr(p.regularizer, "from_recipe")
        ]
        for _, parameter in ours:
            parameter.regularizer = None
        for parameter in self.decaying(ours) if self.weight_decay else []:
            parameter.regularizer = decay

    def _clip(self) -> ClipGradBase | None:
        from paddle.nn import ClipGradByGlobalNorm, ClipGradByValue

        if self.clip is not None:
            return ClipGradByGlobalNorm(self.clip)
        return ClipGradByValue(self.clip_value) if self.clip_value is not None else None
