"""Constants fitted to runs, for the exam's declared splits only: no run has changed the product's, `SHEET`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from paddle_dp.plan.kernel_time import SHEET, Rates
from paddle_dp.plan.step_time import step_time
from paddle_dp.plan.workload import Numbers
from tools.planner.published_rows import Runs

BOUNDS = {
    "gemm": (0.3, 0.95), "side": (4, 400), "memory": (0.3, 0.95), "gap": (1e-7, 1e-4), "host": (5e-5, 5e-3),
    "card_link": (0.1, 0.95), "node_link": (0.1, 0.95), "start": (2e-6, 3e-4), "fixed": (1e-4, 0.5),
}  # fmt: skip
ONE_CARD = ("gemm", "side", "memory", "gap", "host", "fixed")
ALL = (*ONE_CARD, "card_link", "node_link", "start")
ROUNDS = 3  # a simplex that has shrunk too early begins anew
PRIOR = 0.003  # of a squared logarithm: rows that say nothing of a constant leave it at its default


def errors(runs: Runs, rates: Rates = SHEET) -> Numbers:
    """Forecast over measured, minus 1, [n]."""
    return step_time(runs.load, rates).seconds / runs.seconds - 1


def fitted(groups: Sequence[Runs], names: Sequence[str], evaluations: int) -> Rates:
    """The constants `names` that make the mean over groups of their mean absolute log ratio least: Nelder and Mead's
    simplex over their logarithms."""
    low, high = np.log([BOUNDS[name] for name in names]).T
    origin = np.log([asdict(SHEET)[name] for name in names])

    def rates_at(point: npt.NDArray[np.float64]) -> Rates:
        return replace(SHEET, **dict(zip(names, np.exp(np.clip(point, low, high)).tolist(), strict=True)))

    def loss(point: npt.NDArray[np.float64]) -> float:
        rates = rates_at(point)
        ratios = [np.abs(np.log1p(errors(runs, rates))).mean() for runs in groups]
        outside = np.sum((point - np.clip(point, low, high)) ** 2)
        return float(np.mean(ratios) + PRIOR * np.mean((point - origin) ** 2) + outside)

    best = origin
    for _ in range(ROUNDS):
        simplex = np.vstack([best, best + 0.35 * np.eye(len(names))])
        options = {"maxfev": evaluations, "initial_simplex": simplex, "xatol": 1e-4, "fatol": 1e-6}
        best = minimize(loss, best, method="Nelder-Mead", options=options).x
    return rates_at(best)


def probed(runs: Runs, rates: Rates) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """Seconds of all runs, where one measured run of each (width, tensor, micro) sets the time of its blocks; and which
    runs were measured for that: the shortest pipeline's with fewest blocks and micro-batches."""
    load, step = runs.load, step_time(runs.load, rates)
    key = np.stack([load.width, load.tensor, load.micro], axis=1)
    blocks = np.sum(
        [step.terms[n] for n in ("products", "attention", "elementwise", "tensor", "host", "bubble")], axis=0
    )
    seconds, total, measured = step.seconds.copy(), step.seconds, np.zeros(len(runs), bool)
    for shape in np.unique(key, axis=0):
        same = np.flatnonzero((key == shape).all(axis=1))
        probe = min(same, key=lambda i: (load.pipeline[i], load.depth[i], load.micros[i]))
        measured[probe] = True
        times = (runs.seconds[probe] - total[probe] + blocks[probe]) / blocks[probe]
        seconds[same] += (max(times, 0.1) - 1) * blocks[same]
    return seconds, measured
