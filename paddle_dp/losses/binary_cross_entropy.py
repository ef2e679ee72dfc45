"""Sigmoid cross-entropy of yes-or-no labels, averaged or added up over a sample's labels, totalled over samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paddle_dp.losses._base import full_precision, paired
from paddle_dp.units import AboveZero

if TYPE_CHECKING:
    import paddle


class BinaryCrossEntropy:
    """Total over samples: outputs [n] or [n, labels] before the sigmoid, targets 0 to 1."""

    counts_samples = True

    def __init__(self, positive: float = 1.0, summed: bool = False):
        self.positive, self.summed = positive, summed

    @full_precision
    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[paddle.Tensor, int]:
        """(total, number of samples); the total is float32 even under autocast."""
        import paddle
        import paddle.nn.functional as F

        outputs, targets = paired(outputs, targets, "binary_cross_entropy")
        weight = None if self.positive == 1.0 else paddle.full([1], self.positive, outputs.dtype)
        loss = F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight)
        labels = outputs.shape[1] if self.summed and outputs.ndim > 1 else 1
        return loss * outputs.shape[0] * labels, outputs.shape[0]

    @full_precision
    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """The share of correct labels per sample, totalled over samples."""
        outputs, targets = paired(outputs, targets, "binary_cross_entropy")
        hits = (outputs > 0) == (targets > 0.5)
        # The count of hits is exact, so the order of ranks shows in the last division alone.
        return {"acc1": hits.astype(outputs.dtype).sum() / max(1, outputs.size // max(1, outputs.shape[0]))}


@dataclass(frozen=True, kw_only=True)
class Config:
    positive_weight: AboveZero = 1.0
    """Weight of positive labels; negative labels have weight 1."""

    over_labels: Literal["mean", "sum"] = "mean"
    """What a sample's loss is over its labels."""

    def build(self) -> BinaryCrossEntropy:
        return BinaryCrossEntropy(self.positive_weight, self.over_labels == "sum")
