"""Makes one rank late in each step of a proof, so that a rank that does not wait where it must has stale values."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from paddle_dp.parallel import Learner

LATE = 0.02  # seconds: as long as a whole step of a small model takes on one machine


def make_late(learner: Learner, seed: int) -> None:
    """From now on one rank sleeps in each step, before its forward or before its update. Which rank and which of the
    two is drawn from `seed`, the same on all ranks."""
    mesh, draws = learner.mesh, np.random.default_rng(seed)
    train_batch, update = learner.train_batch, learner.optimizer.step
    late = ""

    def trained(*batch: Any, **options: Any) -> Any:
        nonlocal late
        rank, moment = draws.integers(mesh.ranks), ("forward", "update")[draws.integers(2)]
        late = moment if rank == mesh.rank else ""
        _sleep(late == "forward")
        return train_batch(*batch, **options)

    def updated() -> None:
        _sleep(late == "update")
        update()

    if mesh.ranks > 1:
        learner.train_batch = trained  # type: ignore[method-assign]
        learner.optimizer.step = updated  # behind the exchange of a clip, where all ranks wait for each other


def _sleep(late: bool) -> None:
    if late:
        time.sleep(LATE)
