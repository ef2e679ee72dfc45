"""Two traces side by side, and the verdict. No paddle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.checkpoint import find, load

# Largest relative difference that rounding explains, per precision: (loss, gradient norm, weights). float32 sums in
# another order differ by about 1e-7 a step; the low precisions round each product to 8 or 11 bits.
TOLERANCE: Mapping[str, tuple[float, float, float]] = {
    "float32": (1e-5, 1e-4, 1e-4),
    "float64": (1e-12, 1e-11, 1e-11),
    "float16": (2e-3, 2e-2, 1e-3),
    "bfloat16": (1e-2, 5e-2, 5e-3),
}


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one layout did: one row per step, and the weights at the end."""

    ranks: int
    rows: list[dict[str, Any]]
    weights: Mapping[str, np.ndarray]
    random: tuple[str, ...] = ()  # what draws other numbers on another number of ranks, in sentences
    local_norms: tuple[str, ...] = ()
    memory: int = 0  # peak bytes of the largest rank
    held: tuple[Mapping[str, int], ...] = ()  # by rank: bytes of parameters, gradients, optimizer states

    @classmethod
    def read(cls, folder: Path, ranks: int) -> Side:
        record = json.loads((folder / "trace.json").read_text())
        saved = load(find("newest", folder))
        names = [name for name in saved.names if not name.endswith(("._mean", "._variance"))]
        return cls(
            ranks=ranks,
            rows=record["rows"],
            weights={name.removeprefix("model/"): saved.read(name) for name in names},
            random=tuple(record["random"]),
            local_norms=tuple(record["local_norms"]),
            memory=record["memory"],
            held=tuple(record["held"]),
        )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How far two sides are apart, relatively, and how far they may be."""

    loss: float
    gradient_norm: float
    weights: float
    worst: str
    tolerance: tuple[float, float, float]

    @property
    def same(self) -> bool:
        return all(
            a <= b for a, b in zip((self.loss, self.gradient_norm, self.weights), self.tolerance, strict=True)
        )


def relative(a: float, b: float) -> float:
    """|a - b| / max(|a|, |b|); infinite where either is not a number."""
    if not (np.isfinite(a) and np.isfinite(b)):
        return float("inf")
    return abs(a - b) / max(abs(a), abs(b), 1e-30)


def compare(one: Side, many: Side, precision: str) -> Verdict:
    """The largest relative differences: of any step's loss and gradient norm, and of the weights, as the 2-norm of the
    difference over the 2-norm of the whole model (single elements near zero say nothing under Adam)."""
    apart = {n: float(np.square(w - many.weights[n], dtype=np.float64).sum()) for n, w in one.weights.items()}
    whole = sum(float(np.square(w, dtype=np.float64).sum()) for w in one.weights.values())
    distance = (sum(apart.values()) / max(whole, 1e-30)) ** 0.5
    pairs = list(zip(one.rows, many.rows, strict=True))
    return Verdict(
        loss=max(relative(a["loss"], b["loss"]) for a, b in pairs),
        gradient_norm=max(relative(a["gradient_norm"], b["gradient_norm"]) for a, b in pairs),
        weights=distance if np.isfinite(distance) else float("inf"),
        worst=max(apart, key=lambda name: apart[name]),
        tolerance=TOLERANCE[precision],
    )
