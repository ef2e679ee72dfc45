"""The types of the fixtures in conftest.py: `at("step", 5, loss=1.0)` is a moment, `found(acc1=0.5)` an evaluation;
and what a run has saved."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paddle_dp import checkpoint
from paddle_dp.train import Evaluation, Moment, Run

At = Callable[..., Moment]
Found = Callable[..., Evaluation]
Capture = pytest.CaptureFixture[str]


def saved_steps(run: Run) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.checkpoints(run.folder / "checkpoints")]


def best_step(run: Run) -> int | None:
    best = checkpoint.best(run.folder / "checkpoints")
    return None if best is None else checkpoint.step_of(best)
