"""Muon: orthogonal steps of hidden matrices, AdamW for all else (Jordan et al., kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paddle_dp.optimizers._base import Named, OptimizerConfig
from paddle_dp.units import AboveZero, Positive, Probability, Rate

if TYPE_CHECKING:
    from paddle import Tensor, nn
    from paddle.optimizer import Optimizer


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerConfig):
    """Hidden matrices are weights of linear layers and convolutions; `paddle-dp check` lists them, and all others."""

    elementwise: ClassVar[bool] = False

    adamw: tuple[str, ...] | None = None
    """Patterns of parameters that are no hidden matrices, such as [head]; without it, the model's last linear layer."""

    weight_decay: Rate = 0.01
    """Each update first subtracts learning rate × `weight_decay` × weight; biases and norms do not decay."""

    momentum: Probability = 0.95
    """Decay of the running mean of a matrix's gradient."""

    nesterov: bool = True
    """Nesterov momentum."""

    iterations: Positive = 5
    """Iterations of Newton and Schulz that make a matrix orthogonal."""

    scale: Literal["shape", "match_rms"] = "shape"
    """Factor of orthogonal steps: `shape`: √max(1, outputs / inputs); `match_rms`: 0.2 √max(outputs, inputs), which
    makes them as large as AdamW's (Liu et al., arXiv:2502.16982), for AdamW's learning rate and `adamw_lr_scale: 1`."""

    adamw_lr_scale: AboveZero = 0.015
    """AdamW's learning rate as a share of the schedule's: 0.0003 for 0.02."""

    beta1: Probability = 0.9
    """AdamW's decay of the running mean of the gradient."""

    beta2: Probability = 0.95
    """AdamW's decay of the running mean of the squared gradient."""

    epsilon: AboveZero = 1e-10
    """Added to the square root in AdamW's denominator."""

    def update_flops(self, parameters: list[Tensor]) -> float:
        """FLOPs in an update of a prepared model's `parameters`, for `plan`: in each iteration a square of m · m from
        m · n, the square of that, and its product with m · n, for m ≤ n. AdamW's are none."""
        from paddle_dp.core.updates import is_hidden_matrix

        hidden = (p for p in parameters if not p.stop_gradient and is_hidden_matrix(p))
        sides = (sorted((p.shape[0], p.size // p.shape[0])) for p in hidden)
        return float(self.iterations * sum(4 * m * m * n + 2 * m**3 for m, n in sides))

    def prepare(self, model: nn.Layer) -> list[str]:
        """Marks the hidden matrices of the whole model, before it is placed, and describes them."""
        from paddle_dp.core.updates import describe, mark

        mark(model, self.adamw)
        return describe(model)

    def build(self, learning_rate: Any, named_parameters: Named) -> Optimizer:
        from paddle_dp.core.updates import Muon

        return Muon(self, **self.by_parameter(learning_rate, named_parameters))
