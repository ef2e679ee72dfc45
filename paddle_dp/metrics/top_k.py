"""Share of targets among the k highest class scores: acc1, acc3 …."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paddle_dp.errors import UsageError
from paddle_dp.metrics._base import class_rows
from paddle_dp.units import Positive


class TopK:
    """The number of targets that are among the k highest class scores, for each k, and of all targets."""

    def __init__(self, k: tuple[int, ...], ignored: int | None):
        self._k, self._ignored = k, ignored
        self.names = tuple(f"acc{each}" for each in k)

    def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
        """{"hits" [k], "count"}. Raises UsageError if there are fewer classes than k."""
        scores, numbers = class_rows(outputs, targets, self._ignored, "top_k")
        if max(self._k) > scores.shape[-1]:
            raise UsageError(f"metrics.top_k.k: {max(self._k)} is more than the {scores.shape[-1]} classes.")
        hits = scores.topk(max(self._k), axis=-1)[1] == numbers.unsqueeze(-1)
        return {
            "hits": hits.astype("int64").sum(0).cumsum().numpy()[[k - 1 for k in self._k]],
            "count": len(numbers),
        }

    def compute(self, sums: Any) -> dict[str, float]:
        return dict(zip(self.names, sums["hits"] / sums["count"], strict=True))


@dataclass(frozen=True, kw_only=True)
class Config:
    k: tuple[Positive, ...] = (1, 3)
    """The numbers of highest scores; cross_entropy gives acc1 and acc5 anyway."""

    ignore_index: int | None = None
    """Class number of targets that do not count."""

    def __post_init__(self) -> None:
        if not self.k or len({*self.k}) < len(self.k):
            raise ValueError(f"k: {[*self.k]} must hold different numbers, such as [1, 3]")

    def build(self) -> TopK:
        return TopK(self.k, self.ignore_index)
