"""How far a forecast of a step can be trusted: the distance within which 8 of 10 published runs lay.

The numbers are the exam's (tools/planner_exam.py prints them and fails if these differ): ratios of measured and
foretold seconds, with no constant fitted to any of them.
"""

from __future__ import annotations

from typing import Literal

BarClass = Literal["a100", "h100", "narrow", "other"]
# 8 of 10 runs took between 1/ratio and ratio times their forecast.
BARS: dict[BarClass, float] = {"a100": 1.09, "h100": 1.27, "narrow": 1.28, "other": 1.27}
RUNS = {
    "a100": "136 runs on 8 to 3072 A100", "h100": "18 runs on 48 to 16384 H100",
    "narrow": "1440 runs of narrow blocks on up to 8 A100",
    "other": "no run on this device and in this precision: the bar of H100, the widest of a whole device",
}  # fmt: skip
NARROW = 2048  # a block's width up to which kernels are too short for shares of a peak
# Of two layouts that are foretold closer than this ratio, fewer than 8 of 10 published pairs were in that order.
TIE = 1.15
# Sharding stage 3: 8 of 10 published runs took so many times their forecast, so it is not foretold.
STAGE3 = (1.2, 4.3)
STAGE3_RUNS = 13


def bar_class(family: str, width: float) -> BarClass:
    """The class of runs that judges a forecast, for a device's family ("": in float32, as no run) and the model's
    width."""
    if width <= NARROW:
        return "narrow"
    return "a100" if family == "a100" else "h100" if family == "h100" else "other"
