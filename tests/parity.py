"""A small recipe trained in any layout, and what makes a layout one process: the same losses, norms, scores, weights.

    def test_two_stages_are_one_process(tmp_path):
        many = run_ranks(train, 2, str(tmp_path), "{use: hybrid, pipeline: 2}")
        assert_same(many, truth())

30 samples in batches of 8 leave a last batch of 6, in two micro-batches of 3, which no two ranks share equally.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.house.training import build_trainer, finished
from tests.house.training import recorded as recorded
from tests.ranks import run_ranks

ADAMW = "{use: adamw, clip: 0.5}"
RECIPE = """
model: {{use: {model}, vocab: 32, width: 32, depth: 4, heads: 4, length: 16}}
dataset: {{use: random_tokens, vocab: 32, length: 16, samples: 30, test_samples: 10}}
loss: {{use: cross_entropy}}
optimizer: {optimizer}
schedule: {{use: cosine, learning_rate: 3.0e-3, warmup: 3 steps}}
strategy: {strategy}
train: {{length: 10 steps, batch: 8, micro_batches: 2, seed: 3, dropout: {dropout}}}
callbacks: []
"""
SHORT = "5 steps"  # an epoch with its short last batch, and the first step of the next
# The same of a model of two blocks in three steps: an epoch of 8 and 6 samples, and the first step of the next.
QUICK: dict[str, Any] = {"until": "3 steps", "more": ("model.depth=2", "dataset.samples=14")}
# Of two ranks, one for each axis and stage that learns in its own way.
LAYOUTS = {
    "data": "{use: data_parallel}",
    "sharding 1": "{use: hybrid, sharding: 2}",
    "sharding 2": "{use: hybrid, sharding: 2, sharding_stage: 2}",
    "sharding 3": "{use: hybrid, sharding: 2, sharding_stage: 3}",
    "pipeline": "{use: hybrid, pipeline: 2}",
    "tensor": "{use: hybrid, tensor: 2}",
}
Found = dict[str, Any]  # what one rank saw: JSON


def train(
    folder: str,
    strategy: str,
    until: str = "10 steps",
    resume: bool | str = False,
    model: str = "gpt",
    optimizer: str = ADAMW,
    dropout: str = "exact",
    more: Sequence[str] = (),
) -> Found:
    """In every rank: trains, from the newest checkpoint in `folder` or the named one if asked to, evaluates, and saves
    there. `more`: further settings, as on the command line.

    `rows` are [loss, gradient norm] of each step; `memory` is what this rank held, in bytes by kind.
    """
    from paddle_dp.learner.memory import MemoryMeter

    recipe = RECIPE.format(strategy=strategy, model=model, optimizer=optimizer, dropout=dropout)
    trainer = build_trainer(recipe, folder, *more, resume=resume, seed=3)
    memory, placed = MemoryMeter(trainer.learner), trainer.learner.placed
    found = finished(trainer, folder, until)
    zero = getattr(trainer.learner.weights, "zero", None)
    return found | {
        "memory": memory.read(),
        "sizes": [p.size for _, p in placed.named_parameters()],
        "owners": [placed.placements.placement_of(p).owner for _, p in placed.named_parameters()],
        "lent": zero.stage3.most if zero is not None and zero.stage3 is not None else 0,
    }


def train_each(folder: str, strategies: Sequence[str], **how: Any) -> list[Found]:
    """`train` with each of the strategies, one after the other in the same processes (fleet keeps its degrees)."""
    return [train(f"{folder}/{number}", strategy, **how) for number, strategy in enumerate(strategies)]


def train_cases(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Found]:
    """`train` with each case's arguments, one after the other in the same processes."""
    return {name: train(f"{folder}/{name}", **case) for name, case in cases.items()}


@cache
def truth(
    until: str = "10 steps", model: str = "gpt", optimizer: str = ADAMW, more: tuple[str, ...] = ()
) -> Found:
    """What one process learns, once for all tests of a session."""
    folder = tempfile.TemporaryDirectory(prefix="parity-")
    _folders.append(folder)
    how = {"model": model, "optimizer": optimizer, "more": more}
    return run_ranks(train, 1, folder.name, "{use: single}", until, timeout=300, **how)[0]


_folders: list[tempfile.TemporaryDirectory[str]] = []  # removed when the session ends


def weights(checkpoint: str) -> dict[str, np.ndarray]:
    """All that a checkpoint holds, whole, by name."""
    from paddle_dp.checkpoint import load

    saved = load(checkpoint)
    return {name: saved.read(name) for name in saved.names}


def assert_same_weights(ours: str, theirs: str, atol: float = 0.0) -> None:
    """All that two checkpoints hold; without `atol` bit by bit."""
    mine, its = weights(ours), weights(theirs)
    assert mine.keys() == its.keys()
    for name, value in its.items():
        if atol:
            np.testing.assert_allclose(mine[name], value, atol=atol, err_msg=name)
        else:
            assert mine[name].tobytes() == value.tobytes(), name


def assert_same(many: Sequence[Found], one: Found, rtol: float = 1e-5, scores: float = 1e-5) -> None:
    """What every rank found in one layout, against one process; weights and optimizer's state as they were saved.
    `rtol` bounds losses and norms, `scores` the held-out numbers."""
    for found in many:
        np.testing.assert_allclose(found["rows"], one["rows"], rtol=rtol)
        assert found["samples"] == one["samples"]
        assert found["held_out"] == pytest.approx(one["held_out"], rel=scores)
    assert_same_weights(many[0]["saved"], one["saved"], 2e-5)
