"""Samples gathered from unequal shares: what a loss gets, and that each rank's gradient is the sum over the ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.house.recipes import small_recipe
from tests.house.training import trained
from tests.parity import assert_same
from tests.ranks import run_ranks

RANKS = 3
SIZES = (2, 0, 3)  # the second rank has a dummy


def gathered() -> Any:
    """In every rank: the gradient of Σ over ranks of (rank + 1) · Σ of all rows · their number."""
    import paddle

    from paddle_dp.core.gathered_samples import GatheredSamples
    from paddle_dp.mesh import join

    mesh = join()
    samples = GatheredSamples(range(mesh.ranks), mesh.rank, mesh)
    mine = SIZES[mesh.rank]
    rows = paddle.full([max(mine, 1), 2], float(mesh.rank), "float64")
    rows.stop_gradient = False
    numbers = paddle.full([max(mine, 1)], mesh.rank, "int64")
    with samples.present(mine > 0):
        (all_rows, all_numbers), first = samples.gather(rows, numbers)
    weights = paddle.arange(1, len(all_rows) + 1, dtype="float64").unsqueeze(-1)
    total = ((mesh.rank + 1) * all_rows * weights).sum()
    total.backward()
    with samples.alone():
        (alone,), _ = samples.gather(rows)
    with samples.present(False):  # on all ranks: a batch of fewer samples than micro-batches
        (dummies,), _ = samples.gather(rows[:1])
    assert len(dummies) == 1
    return [all_rows[:, 0].tolist(), all_numbers.tolist(), first, rows.grad[:, 0].tolist(), len(alone)]


@pytest.mark.timeout(60)
def test_each_rank_has_all_rows_and_gets_its_gradient_from_all_ranks() -> None:
    found = run_ranks(gathered, RANKS)
    for rows, numbers, *_ in found:
        assert rows == [0, 0, 2, 2, 2]
        assert numbers == [0, 0, 2, 2, 2]
    assert [first for _, _, first, _, _ in found] == [0, 5, 2]
    np.testing.assert_array_equal(found[0][3], [6 * 1, 6 * 2])
    np.testing.assert_array_equal(found[1][3], [0])
    np.testing.assert_array_equal(found[2][3], [6 * 3, 6 * 4, 6 * 5])
    assert [alone for *_, alone in found] == [2, 1, 3]


def recipe(loss: str, strategy: str, across: str = "ranks", micro_batches: int = 2) -> str:
    return small_recipe(
        f"length: 6 steps, batch: 11, micro_batches: {micro_batches}, seed: 3", loss=f"{loss}, across: {across}",
        model="mlp, inputs: 64, hidden: [16], classes: 6, activation: gelu", optimizer="sgd",
        schedule="constant, learning_rate: 0.05", strategy=strategy, callbacks="[]",
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("loss", ["contrastive", "triplet", "pairwise"])
@pytest.mark.parametrize(
    ("ranks", "strategy", "micro_batches"),
    [
        (2, "{use: data_parallel}", 2),
        (3, "{use: data_parallel}", 5),  # 11 samples in 5 micro-batches: some ranks have none of 2
        (2, "{use: hybrid, sharding: 2, sharding_stage: 3}", 2),
        (4, "{use: hybrid, pipeline: 2, data: 2}", 2),
    ],
)
def test_pairs_across_ranks_are_those_of_one_process(tmp_path, loss, ranks, strategy, micro_batches) -> None:
    alone = recipe(loss, "{use: single}", micro_batches=micro_batches)
    (one,) = run_ranks(trained, 1, alone, str(tmp_path / "one"))
    together = recipe(loss, strategy, micro_batches=micro_batches)
    many = run_ranks(trained, ranks, together, str(tmp_path / "many"), timeout=200)
    assert_same(many, one, 2e-5, 1e-4)
    assert all(found["differences"] == [] for found in many)


@pytest.mark.long
def test_pairs_of_one_rank_are_another_loss_and_named(tmp_path) -> None:
    (one,) = run_ranks(trained, 1, recipe("pairwise", "{use: single}", "rank"), str(tmp_path / "one"))
    many = run_ranks(trained, 2, recipe("pairwise", "{use: data_parallel}", "rank"), str(tmp_path / "many"))
    assert abs(many[0]["rows"][0][0] - one["rows"][0][0]) > 1e-3
    assert "compares the samples of each rank with one another only" in many[0]["differences"][0]
