"""Triplet loss: the farthest sample of an anchor's class must be nearer, by a margin, than any of another class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paddle_dp.losses._base import full_precision
from paddle_dp.losses._pairs import Across, ComparesSamples, squared_distances
from paddle_dp.units import AboveZero

if TYPE_CHECKING:
    import paddle

_FAR = 1e9  # farther than anything


class Triplet(ComparesSamples):
    """Sum over anchors of max(0, d(farthest positive) - d(nearest negative) + margin), d the squared distance.

    Outputs [n, d] with class numbers as targets [n]. The distances are FaceNet's, with embeddings of length 1 (Schroff
    et al., arXiv:1503.03832, eq. 1). Each anchor uses its hardest positive and negative of the batch (Hermans et al.,
    arXiv:1703.07737, eq. 5). An anchor without a positive, or without a negative, does not count.
    """

    def __init__(self, across: Across, margin: float, normalize: bool):
        super().__init__(across)
        self.margin, self.normalize = margin, normalize

    @full_precision
    def __call__(self, outputs: Any, targets: Any) -> tuple[paddle.Tensor, paddle.Tensor]:
        """(total, the number of anchors that count); the total is float32 even under autocast."""
        farthest, nearest, counts = self._hardest(outputs, targets)
        return ((farthest - nearest + self.margin).clip(min=0.0) * counts).sum(), counts.sum()

    @full_precision
    def scores(self, outputs: Any, targets: Any) -> dict[str, paddle.Tensor]:
        """`apart`: the number of counting anchors with all positives nearer than every negative."""
        farthest, nearest, counts = self._hardest(outputs, targets)
        return {"apart": ((farthest < nearest).astype(counts.dtype) * counts).sum()}

    def _hardest(self, outputs: Any, targets: Any) -> tuple[paddle.Tensor, paddle.Tensor, paddle.Tensor]:
        """Three tensors [n]: the squared distances of the farthest positive and the nearest negative; 1 if the anchor
        counts, else 0."""
        import paddle

        anchors, samples, same, diagonal = self.compared(outputs, targets, "triplet", self.normalize)
        distances = squared_distances(anchors, samples)
        positive = same.logical_and(diagonal.logical_not())
        far = paddle.full_like(distances, _FAR)
        farthest = paddle.where(positive, distances, -far).max(-1)
        nearest = paddle.where(same, far, distances).min(-1)
        counts = positive.any(-1).logical_and(same.logical_not().any(-1))
        return farthest, nearest, counts.astype(distances.dtype)


@dataclass(frozen=True, kw_only=True)
class Config:
    across: Across = "ranks"
    """The samples to compare with: `ranks`, the global micro-batch, as in one process; `rank`, each rank's samples,
    which is another loss on another number of ranks."""

    margin: AboveZero = 0.2
    """Smallest difference between the squared distances of the nearest negative and the farthest positive."""

    normalize: bool = True
    """Divide embeddings by their length first."""

    def build(self) -> Triplet:
        return Triplet(self.across, self.margin, self.normalize)
