"""How far a forecast of a step can be trusted: the distance within which 8 of 10 published runs lay.

The numbers are the exam's (tools/planner_exam.py prints them and fails if these differ): ratios of measured and
foretold seconds, with no constant fitted to any of them.
"""

from __future__ import annotations

from typing import Literal

BarClass = Literal["a100", "h100", "narrow", "traced", "other"]
# 8 of 10 runs took between 1/ratio and ratio times their forecast.
BARS: dict[BarClass, float] = {"a100": 1.09, "h100": 1.27, "narrow": 1.28, "traced": 1.45, "other": 1.28}
RUNS = {
    "a100": "136 runs on 8 to 3072 A100", "h100": "18 runs on 48 to 16384 H100",
    "narrow": "1440 runs of narrow blocks on up to 8 A100",
    "traced": "12 runs of ResNet-50 on 1 to 8 V100 and A100, the only ones of a model that is no transformer",
    "other": "no run of such a device, network, precision and width: the widest of the transformers' bars",
}  # fmt: skip
NARROW = 2048  # a block's width up to which kernels are too short for shares of a peak
# Of two layouts that are foretold closer than this ratio, fewer than 8 of 10 published pairs were in that order.
TIE = 1.15
# Beyond one node, from measured steps on 1 and 8 cards: 42 points of Paddle's own published series, to 256 cards.
SCALING = 1.05
# Sharding stage 3: 8 of 10 published runs, of 13, took so many times their forecast, so it is not foretold.
STAGE3 = (1.2, 4.3)


def bar_class(family: str, width: float) -> BarClass:
    """The class of runs that judges a forecast, for a device's family ("": in float32 or over another network, as no
    run) and the model's width. Narrow blocks were measured on A100 only."""
    if family == "a100":
        return "narrow" if width <= NARROW else "a100"
    return "h100" if family == "h100" and width > NARROW else "other"
