"""What the optimizers share: which parameters decay, and how gradients are clipped.

No parameter groups: `paddle.optimizer` clips each group by a norm of its own, so no norm would be global.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Gt

from paddle_dp.units import Rate

if TYPE_CHECKING:
    from paddle import Tensor

Named = Sequence[tuple[str, "Tensor"]]
AboveZero = Annotated[float, Gt(0)]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    weight_decay: Rate = 0.0
    """How strongly weights are drawn towards 0; not biases and norms."""

    decay_all: bool = False
    """Biases and norms decay, too."""

    clip: AboveZero | None = None
    """The most that the norm of all gradients together may be."""

    clip_value: AboveZero | None = None
    """The most that each number of a gradient may be."""

    def __post_init__(self) -> None:
        if self.clip is not None and self.clip_value is not None:
            raise ValueError(
                "clip_value: give clip (norm of all gradients) or clip_value (each number), not both"
            )

    def shared(self, learning_rate: Any, named_parameters: Named) -> dict[str, Any]:
        """The arguments that all take: rate, parameters, clip, float32 copies of weights in half precision."""
        from paddle import bfloat16, float16

        parameters = [parameter for _, parameter in named_parameters]
        return {
            "learning_rate": learning_rate,
            "parameters": parameters,
            "grad_clip": self._clip(),
            # Asked of every parameter at every step, which costs a small model 50 µs: only where there are such.
            "multi_precision": any(parameter.dtype in (float16, bfloat16) for parameter in parameters),
        }

    def decaying(self, named_parameters: Named) -> list[Tensor]:
        """The parameters that decay: all, or those with two dims and more."""
        return [parameter for _, parameter in named_parameters if self.decay_all or parameter.ndim > 1]

    def decay_by_regularizer(self, named_parameters: Named) -> None:
        """Tie L2 decay to the parameters that decay, which is as exact as `weight_decay=` and leaves the others out.

        A regularizer that the model brought stays; one from an earlier call is replaced.
        """
        from paddle.regularizer import L2Decay

        decay = L2Decay(float(self.weight_decay))
        decay.of_recipe = True
        ours = [
            p for _, p in named_parameters if p.regularizer is None or hasattr(p.regularizer, "of_recipe")
        ]
        for parameter in ours:
            parameter.regularizer = None
        for parameter in self.decaying([("", parameter) for parameter in ours]) if self.weight_decay else []:
            parameter.regularizer = decay

    def _clip(self) -> Any:
        from paddle.nn import ClipGradByGlobalNorm, ClipGradByValue

        if self.clip is not None:
            return ClipGradByGlobalNorm(self.clip)
        return ClipGradByValue(self.clip_value) if self.clip_value is not None else None
