"""R², mean absolute error and root mean squared error of numbers, the mean over columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_dp.errors import UsageError


class Regression:
    """Scores of outputs [n] or [n, columns] with targets of as many numbers, in float64."""

    names = ("r2", "mae", "rmse")

    def __call__(self, outputs: Any, targets: Any) -> dict[str, float]:
        arrays = [each for each in (outputs, targets) if isinstance(each, np.ndarray)]
        shapes = {tuple(side for side in each.shape[1:] if side != 1) for each in arrays}
        if len(arrays) < 2 or len(shapes) > 1:
            raise UsageError("it takes outputs and targets that are numbers of one shape.")
        if len(targets) < 2:
            raise UsageError("R² needs two held-out samples.")
        true = targets.astype("float64").reshape(len(targets), -1)
        error = outputs.astype("float64").reshape(true.shape) - true
        squared, spread = (error**2).sum(0), ((true - true.mean(0)) ** 2).sum(0)
        # As scikit-learn's: of a column without spread R² is 1 if it is predicted exactly, else 0.
        flat = np.where(squared > 0, 0.0, 1.0)
        r2 = np.where(spread > 0, 1 - squared / np.where(spread > 0, spread, 1), flat)
        rmse = np.sqrt(squared / len(true))
        return {"r2": float(r2.mean()), "mae": float(np.abs(error).mean()), "rmse": float(rmse.mean())}


@dataclass(frozen=True, kw_only=True)
class Config:
    def build(self) -> Regression:
        return Regression()
