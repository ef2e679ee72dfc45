"""Sigmoid cross-entropy of yes-or-no labels, averaged or added up over a sample's labels, totalled over samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Le

from paddle_dp.errors import DataError, LossError
from paddle_dp.losses._base import full_precision, paired
from paddle_dp.units import AboveZero

if TYPE_CHECKING:
    import paddle


Share = Annotated[float, Ge(0), Le(1)]


class BinaryCrossEntropy:
    """Total over samples: outputs [n] or [n, labels, …] before the sigmoid, targets 0 to 1.

    With `frequencies` f [labels], a label's loss is multiplied by exp(1 - f) where it is there, by exp(f) where not
    (Jia et al., arXiv:2005.11909).
    """

    counts_samples = multi_label = True
    use = "binary_cross_entropy"  # its name in a recipe, for messages

    def __init__(self, positive: float = 1.0, summed: bool = False, frequencies: Sequence[float] = ()):
        self.positive, self.summed, self.frequencies = positive, summed, tuple(frequencies)

    @full_precision
    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> tuple[paddle.Tensor, int]:
        """(total, number of samples); the total is float32 even under autocast."""
        import paddle
        import paddle.nn.functional as F

        outputs, targets = paired(outputs, targets, self.use)
        weight = None if self.positive == 1.0 else paddle.full([1], self.positive, outputs.dtype)
        if self.frequencies:
            losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none", pos_weight=weight)
            loss = (losses * self._rarity(outputs, targets)).mean()
        else:
            loss = F.binary_cross_entropy_with_logits(outputs, targets, pos_weight=weight)
        labels = outputs.size // max(1, outputs.shape[0]) if self.summed else 1
        return loss * outputs.shape[0] * labels, outputs.shape[0]

    @full_precision
    def scores(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> dict[str, paddle.Tensor]:
        """The share of correct labels per sample, totalled over samples."""
        outputs, targets = paired(outputs, targets, self.use)
        hits = (outputs > 0) == (targets > 0.5)
        # The count of hits is exact, so the order of ranks shows in the last division alone.
        return {"acc1": hits.astype(outputs.dtype).sum() / max(1, outputs.size // max(1, outputs.shape[0]))}

    def probabilities(self, outputs: paddle.Tensor) -> paddle.Tensor:
        """The probability of each label."""
        import paddle.nn.functional as F

        return F.sigmoid(outputs)

    def _rarity(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        """The weight of each label of each sample. Raises LossError for another number of labels."""
        import paddle

        labels = outputs.shape[1] if outputs.ndim > 1 else 1
        if labels != len(self.frequencies):
            raise LossError(
                f"loss.frequencies has {len(self.frequencies)} numbers, and outputs have {labels} labels: give one for "
                "each label"
            )
        there, absent = (
            paddle.to_tensor([exp(abs(side - f)) for f in self.frequencies], outputs.dtype) for side in (1, 0)
        )
        return paddle.where(targets > 0.5, there, absent)


@dataclass(frozen=True, kw_only=True)
class Config:
    positive_weight: AboveZero = 1.0
    """Weight of positive labels; negative labels have weight 1."""

    frequencies: str | tuple[Share, ...] | None = None
    """The share of samples that have each label, or the list of the training, to count them in (a line is
    `images/a.jpg 0,1,1`): the rarer a label is, the more a sample that has it counts."""

    over_labels: Literal["mean", "sum"] = "mean"
    """What a sample's loss is over its labels."""

    def build(self) -> BinaryCrossEntropy:
        shares = self.frequencies
        counted = _counted(Path(shares).expanduser()) if isinstance(shares, str) else shares or ()
        return BinaryCrossEntropy(self.positive_weight, self.over_labels == "sum", counted)


def _counted(file: Path) -> list[float]:
    """The share of the lines of a list that have each label. Raises DataError for a line without such labels."""
    try:
        lines = [line.split() for line in file.read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"loss.frequencies: {file} cannot be read as a list of images: {error}") from error
    marks = [line[-1].split(",") for line in lines]
    if not marks:
        raise DataError(f"loss.frequencies: {file} lists no image")
    for number, (line, labels) in enumerate(zip(lines, marks, strict=True), 1):
        if len(line) < 2 or len(labels) != len(marks[0]) or not {*labels} <= {"0", "1"}:
            raise DataError(
                f"loss.frequencies: image {number} of {file} has no {len(marks[0])} labels, each 0 or 1, with commas "
                "between them"
            )
    return [sum(label == "1" for label in column) / len(marks) for column in zip(*marks, strict=True)]
