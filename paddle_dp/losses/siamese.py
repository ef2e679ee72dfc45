"""Margin loss over given pairs of embeddings: near for target 1, at least a margin apart for target 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddle_dp.errors import LossError
from paddle_dp.losses._base import full_precision, widened
from paddle_dp.losses._pairs import margin_losses
from paddle_dp.units import AboveZero

if TYPE_CHECKING:
    import paddle


class Siamese:
    """Total over pairs: outputs are two embeddings [n, d], targets [n] are 1 for two of a kind, else 0.

    A pair does not depend on other pairs, so pairs are distributed over ranks like samples.
    """

    counts_samples = True

    def __init__(self, margin: float):
        self.margin = margin

    @full_precision
    def __call__(self, outputs: Any, targets: paddle.Tensor) -> tuple[paddle.Tensor, int]:
        """(total, number of pairs); the total is float32 even under autocast."""
        squares, same = _pairs(outputs, targets)
        return margin_losses(squares, same, self.margin).sum(), squares.shape[0]

    @full_precision
    def scores(self, outputs: Any, targets: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """`acc1`: the number of pairs that the threshold of half the margin classifies correctly."""
        squares, same = _pairs(outputs, targets)
        right = (squares < (self.margin / 2) ** 2) == (same > 0.5)
        return {"acc1": right.astype("float32").sum()}


def _pairs(outputs: Any, targets: paddle.Tensor) -> tuple[paddle.Tensor, paddle.Tensor]:
    """Squared distances [n], and targets [n] in their dtype. Raises LossError for other outputs."""
    if not isinstance(outputs, tuple | list) or len(outputs) != 2 or outputs[0].shape != outputs[1].shape:
        raise LossError(
            "siamese takes two embeddings of one shape as outputs, (a [n, d], b [n, d]), of a pair's two sides: "
            "return both from forward. Pairs within a batch are for loss pairwise."
        )
    left, right = (widened(side) for side in outputs)
    squares = (left - right).square().sum(-1)
    return squares, targets.reshape([-1]).astype(squares.dtype)


@dataclass(frozen=True, kw_only=True)
class Config:
    margin: AboveZero = 1.0
    """Distance from which on two samples of different kinds are far enough apart."""

    def build(self) -> Siamese:
        return Siamese(self.margin)
