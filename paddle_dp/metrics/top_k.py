"""Share of targets among the k highest class scores: acc2, acc3 …."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.metrics._base import OfClasses, class_rows
from paddle_dp.tensors import holds_nan
from paddle_dp.units import Positive


class TopK(OfClasses):
    """The number of targets that are among the k highest class scores, for each k, and of all targets."""

    def __init__(self, k: tuple[int, ...], ignored: int | None):
        super().__init__(ignored)
        self._k = k
        self.names = tuple(f"acc{each}" for each in k)

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        """{"hits" [k], "count"}; NaN if a score is. Raises UsageError if there are fewer classes than k."""
        scores, numbers = class_rows(outputs, targets, self.ignored)
        if max(self._k) > scores.shape[-1]:
            raise UsageError(f"k: {max(self._k)} is more than the {scores.shape[-1]} classes.")
        is_hit = scores.topk(max(self._k), axis=-1)[1] == numbers.unsqueeze(-1)
        hits = is_hit.astype("int64").sum(0).cumsum().numpy()[[k - 1 for k in self._k]]
        return {"hits": hits + math.nan if holds_nan(scores) else hits, "count": len(numbers)}

    def compute(self, sums: Any) -> dict[str, float]:
        return dict(zip(self.names, sums["hits"] / sums["count"], strict=True))


@dataclass(frozen=True, kw_only=True)
class Config:
    k: tuple[Positive, ...] = (3,)
    """The numbers of highest scores. cross_entropy gives acc1 and acc5 itself."""

    ignore_index: int | None = None
    """Class number of targets that do not count; the loss's by default."""

    def __post_init__(self) -> None:
        if not self.k or len({*self.k}) < len(self.k):
            raise ValueError(f"k: {[*self.k]} must hold different numbers, such as [2, 3]")

    def build(self) -> TopK:
        return TopK(self.k, self.ignore_index)
