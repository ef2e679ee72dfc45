"""Margin loss over all pairs of the batch: it draws pairs of one class together and pushes all others apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddle_dp.losses._base import full_precision
from paddle_dp.losses._pairs import Across, ComparesSamples, margin_losses, squared_distances
from paddle_dp.units import AboveZero

if TYPE_CHECKING:
    import paddle


class Pairwise(ComparesSamples):
    """Sum over ordered pairs of two samples at distance d: d² within a class, else max(0, margin - d)² (Hadsell, Chopra
    and LeCun, CVPR 2006, eq. 4, without its factor ½).

    Outputs [n, d] with class numbers as targets [n]. Loss `siamese` takes a data set's pairs.
    """

    def __init__(self, across: Across, margin: float):
        super().__init__(across)
        self.margin = margin

    @full_precision
    def __call__(self, outputs: Any, targets: Any) -> tuple[paddle.Tensor, paddle.Tensor]:
        """(total, the number of pairs); the total is float32 even under autocast."""
        squares, same, counts = self._compared(outputs, targets)
        return (margin_losses(squares, same, self.margin) * counts).sum(), counts.sum()

    @full_precision
    def scores(self, outputs: Any, targets: Any) -> dict[str, paddle.Tensor]:
        """`acc1`: the number of pairs that the threshold of half the margin classifies correctly."""
        squares, same, counts = self._compared(outputs, targets)
        right = (squares < (self.margin / 2) ** 2).astype(same.dtype) == same
        return {"acc1": (right.astype(counts.dtype) * counts).sum()}

    def _compared(self, outputs: Any, targets: Any) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Three tensors [anchors, samples]: squared distances; 1 for one class, else 0; 1 for different samples, else
        0."""
        anchors, samples, same, diagonal = self.compared(outputs, targets, "pairwise", False)
        squares = squared_distances(anchors, samples).clip(min=0.0)
        return squares, same.astype(squares.dtype), diagonal.logical_not().astype(squares.dtype)


@dataclass(frozen=True, kw_only=True)
class Config:
    across: Across = "ranks"
    """The samples to compare with: `ranks`, the global micro-batch, as in one process; `rank`, each rank's samples,
    which is another loss on another number of ranks."""

    margin: AboveZero = 1.0
    """Distance from which on two samples of different classes are far enough apart."""

    def build(self) -> Pairwise:
        return Pairwise(self.across, self.margin)
