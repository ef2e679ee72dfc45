"""Recall at k of embeddings: the share of samples with one of their class among the k nearest others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_dp.errors import UsageError
from paddle_dp.units import Positive

_ROWS = 1024  # queries whose distances are computed at once


class Retrieval:
    """Outputs [n, d] are embeddings, compared by their cosine; targets [n] are class numbers. Each held-out sample is a
    query to all others."""

    def __init__(self, k: tuple[int, ...]):
        self._k = k
        self.names = tuple(f"recall_at_{each}" for each in k)

    def __call__(self, outputs: Any, targets: Any) -> dict[str, float]:
        both = isinstance(outputs, np.ndarray) and isinstance(targets, np.ndarray)
        if not both or outputs.ndim != 2 or targets.size != len(outputs):
            raise UsageError("it takes embeddings [n, d] and class numbers [n].")
        if max(self._k) >= len(outputs):
            raise UsageError(f"k: {max(self._k)} others are wanted, and there are {len(outputs) - 1}.")
        if np.isnan(outputs).any():
            return dict.fromkeys(self.names, np.nan)
        vectors, classes = outputs.astype("float64"), targets.reshape(-1)
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        hits = np.zeros(len(self._k))
        for start in range(0, len(vectors), _ROWS):
            cosines = vectors[start : start + _ROWS] @ vectors.T
            np.fill_diagonal(cosines[:, start:], -np.inf)  # a query is not its own neighbour
            nearest = np.argsort(-cosines, axis=1, kind="stable")[:, : max(self._k)]
            same = np.logical_or.accumulate(classes[nearest] == classes[start : start + _ROWS, None], axis=1)
            hits += same[:, [k - 1 for k in self._k]].sum(0)
        return dict(zip(self.names, hits / len(vectors), strict=True))


@dataclass(frozen=True, kw_only=True)
class Config:
    k: tuple[Positive, ...] = (1, 5)
    """The numbers of nearest others."""

    def __post_init__(self) -> None:
        if not self.k or len({*self.k}) < len(self.k):
            raise ValueError(f"k: {[*self.k]} must hold different numbers, such as [1, 5]")

    def build(self) -> Retrieval:
        return Retrieval(self.k)
