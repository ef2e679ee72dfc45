"""What a mesh exchanges: sums, gathered values, a barrier."""

import time

import pytest

from paddle_dp.errors import UsageError
from tests.ranks import run_ranks


def exchanges():
    import paddle

    from paddle_dp.mesh import join

    mesh = join(seed=5)
    again = join()
    return {
        "same": mesh is again,
        "place": [mesh.rank, mesh.ranks, mesh.dp_rank, mesh.dp_size, mesh.is_main],
        "sum": mesh.sum([mesh.rank, 0.5, 1e15 + mesh.rank]),
        "gather": mesh.gather({"rank": mesh.rank, "word": "é" * mesh.rank, "nothing": None}),
        "drawn": paddle.rand([2]).tolist(),
    }


def test_three_ranks_exchange_sums_and_values():
    results = run_ranks(exchanges, 3)
    for rank, result in enumerate(results):
        assert result["same"]
        assert result["place"] == [rank, 3, rank, 3, rank == 0]
        assert result["sum"] == [3.0, 1.5, 3e15 + 3]  # exact in float64, not in float32
        assert result["gather"] == [{"rank": r, "word": "é" * r, "nothing": None} for r in range(3)]
        assert result["drawn"] == results[0]["drawn"]


def test_a_parallel_environment_that_was_made_before_is_named(monkeypatch):
    """Paddle's store is open by then: it was taken for another program's."""
    import paddle

    from paddle_dp.mesh import mesh

    monkeypatch.setattr(mesh, "_joined", {})
    monkeypatch.setattr(paddle.distributed, "is_initialized", lambda: True)
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "0")
    with pytest.raises(
        UsageError, match=r"init_parallel_env\(\), fleet.init\(\) or paddle.Model\(\): leave that call out"
    ):
        mesh.join()


def test_a_mesh_of_one_needs_no_group():
    alone = run_ranks(exchanges, 1)[0]
    assert alone["place"] == [0, 1, 0, 1, True]
    assert alone["sum"] == [0.0, 0.5, 1e15]
    assert alone["gather"] == [{"rank": 0, "word": "", "nothing": None}]


def patience():
    from paddle_dp.mesh import join

    mesh = join()
    if mesh.is_main:
        time.sleep(1.0)
    began = time.monotonic()
    mesh.wait("slow rank 0")
    mesh.wait("twice")
    return time.monotonic() - began


def test_wait_waits_for_the_slowest():
    first, second = run_ranks(patience, 2)
    assert first < 0.9
    assert second > 0.9
