"""BatchNorm over all ranks under real autocast: parameters and moments stay float32, as Paddle's own do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.house.recipes import small_recipe
from tests.house.training import build_trainer, recorded
from tests.ranks import run_ranks

CONVNET = small_recipe(
    "length: 3 steps, batch: 30, seed: 3, precision: {dtype: bfloat16, level: O2}", callbacks="[]",
    model="convnet, norm: batch", dataset="digits, as_image: true", optimizer="momentum",
    schedule="constant, learning_rate: 0.05", strategy="data_parallel",
)  # fmt: skip


def learn(folder: str) -> dict[str, Any]:
    """In a rank: the losses and norms of a training at level O2, and the types of the norms' tensors."""
    from paddle_dp.core.batch_norm import is_batch_norm

    trainer = build_trainer(CONVNET, folder)
    norms = [layer for layer in trainer.learner.model.sublayers() if is_batch_norm(layer)]
    rows = recorded(trainer)
    trainer.fit()
    types = {str(x.dtype) for norm in norms for x in (norm.weight, norm.bias, norm._mean, norm._variance)}
    return {"rows": rows, "kinds": sorted({type(norm).__name__ for norm in norms}), "types": sorted(types)}


def test_two_ranks_at_level_o2_normalize_in_float32_like_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIM_NAME", "npu")
    (one,) = run_ranks(learn, 1, str(tmp_path / "one"))
    two = run_ranks(learn, 2, str(tmp_path / "two"))
    assert one["kinds"] == ["BatchNorm2D"] and two[0]["kinds"] == ["SyncBatchNorm"]
    assert one["types"] == two[0]["types"] == ["paddle.float32"]
    np.testing.assert_allclose(two[0]["rows"], one["rows"], rtol=0.02)
