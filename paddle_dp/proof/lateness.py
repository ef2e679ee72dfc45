"""Makes one rank late in each step of a proof: a rank that does not wait for it reads stale values."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from paddle_dp.learner import Learner

SHORTEST, LONGEST = 0.02, 2.0  # seconds


def make_late(learner: Learner, seed: int) -> None:
    """From now on one rank sleeps in each step, before forward or update. `seed`, equal on all ranks, decides both.

    It sleeps for as long as its shortest step took, so that even on a busy machine the others reach values that they
    must not read yet. (The last step may have been long because another rank slept.)
    """
    mesh, draws = learner.mesh, np.random.default_rng(seed)
    train_batch, update = learner.train_batch, learner.optimizer.step
    late, slept, steps = "", 0.0, [LONGEST]  # seconds of this rank in each, without its sleep

    def sleep(moment: str) -> None:
        nonlocal slept
        if late == moment:
            slept = max(min(steps), SHORTEST)
            time.sleep(slept)

    def trained(*batch: Any, **options: Any) -> Any:
        nonlocal late, slept
        rank, moment = draws.integers(mesh.ranks), ("forward", "update")[draws.integers(2)]
        late, slept = moment if rank == mesh.rank and len(steps) > 1 else "", 0.0
        begun = time.perf_counter()
        sleep("forward")
        metrics = train_batch(*batch, **options)
        steps.append(time.perf_counter() - begun - slept)
        return metrics

    def updated() -> None:
        sleep("update")
        update()

    if mesh.ranks > 1:
        learner.train_batch = trained  # type: ignore[method-assign]
        learner.optimizer.step = updated  # after the exchange of a clip, where all ranks wait for each other
