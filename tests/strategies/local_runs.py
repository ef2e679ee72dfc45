"""Trains digits in forks of waiting ranks, under any strategy, and tells what each rank has seen."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.house.recipes import small_recipe
from tests.house.training import build_trainer, recorded

RECIPE = small_recipe(
    "length: 24 steps, batch: 25, micro_batches: 2, seed: 3", optimizer="sgd", strategy="local_sgd",
    model="mlp, inputs: 64, hidden: [16], classes: 10, activation: gelu", callbacks="[]",
    schedule="cosine, learning_rate: 0.2, warmup: 4 steps",
)  # fmt: skip
Found = dict[str, Any]


def trainer(folder: str, words: Sequence[str], resume: str | None = None) -> Any:
    """The trainer of the recipe with these overrides, on this rank."""
    return build_trainer(RECIPE, folder, *words, resume=resume, seed=3)


def train(
    folder: str,
    words: Sequence[str],
    until: str | None = None,
    resume: str | None = None,
    evaluate_at: int | None = None,
    save_at: int | None = None,
) -> Found:
    """Trains, evaluates and saves on the way and at the end."""
    from paddle_dp import checkpoint
    from paddle_dp.train import Callback

    here = trainer(folder, words, resume)
    found: Found = {"rows": recorded(here)}

    class Between(Callback):
        reads = False

        def step(self, moment: Any) -> None:
            if moment.progress.step == evaluate_at:
                found["on_the_way"] = dict(moment.trainer.evaluate().numbers)
            if moment.progress.step == save_at:
                saved = checkpoint.save(
                    moment.trainer.snapshot(), Path(folder) / "between", moment.trainer.mesh
                )
                found["between"] = str(saved)

    here.add(Between())
    here.fit(until)
    found["own"] = digest(here.learner)
    found["held_out"] = dict(here.evaluate().numbers)
    found["saved"] = str(checkpoint.save(here.snapshot(), Path(folder) / "end", here.mesh))
    found["differences"] = here.differences
    return found


def digest(learner: Any) -> str:
    """Of this rank's weights."""
    bits = b"".join(np.ascontiguousarray(p.numpy()).tobytes() for _, p in learner.placed.named_parameters())
    return hashlib.blake2b(bits, digest_size=8).hexdigest()


def train_each(cases: Sequence[dict[str, Any]]) -> list[Found]:
    """`train` with each of the arguments, one after the other in the same processes."""
    return [train(**case) for case in cases]
