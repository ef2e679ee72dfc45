"""Groups that overlap, come late or are made in any order start, and each exchanges among its own ranks."""

from __future__ import annotations

import time
from itertools import combinations
from typing import Any

import pytest

from tests.ranks import run_ranks


def sums_by_group(installed: str) -> list[float]:
    """Sums of the ranks' numbers in every group of two and more of four ranks, and again after another round."""
    import paddle
    import paddle.distributed as dist

    from paddle_dp.gloo import install
    from paddle_dp.mesh import join

    if installed == "before join":
        install("cpu")
    mesh = join()
    if installed == "after join":
        install(mesh.device)
    sets = [ranks for size in (2, 3, 4) for ranks in combinations(range(mesh.ranks), size)]
    groups = [dist.new_group(list(ranks)) for ranks in sets]
    found = []
    for ranks, group in [*zip(sets, groups, strict=True)] * 2:
        value = paddle.full([], float(10**mesh.rank))
        if mesh.rank in ranks:
            dist.all_reduce(value, group=group)
        found.append(value.item())
    return found


@pytest.mark.parametrize(
    "installed", ["before join", pytest.param("after join", marks=pytest.mark.long), "never"]
)
def test_every_subset_of_four_ranks_is_a_group(installed: str) -> None:
    """A script that joins and never installs the bridge has its groups: they hung, or ended in "Connection refused"."""
    sets = [ranks for size in (2, 3, 4) for ranks in combinations(range(4), size)]
    for rank, found in enumerate(run_ranks(sums_by_group, 4, installed, timeout=120)):
        expected = [sum(10.0**r for r in ranks) if rank in ranks else 10.0**rank for ranks in sets]
        assert found == expected * 2


def starts_with_one_late(seconds: float) -> list[Any]:
    import paddle
    import paddle.distributed as dist

    from paddle_dp.gloo import install
    from paddle_dp.mesh import join

    install("cpu")
    mesh = join()
    begin = time.monotonic()
    for late in range(mesh.ranks):  # each rank in turn is the late one: also the first, which opens the store
        if mesh.rank == late:
            time.sleep(seconds)
        group = dist.new_group(list(range(mesh.ranks)))
    value = paddle.ones([1])
    dist.all_reduce(value, group=group)
    return [value.item(), time.monotonic() - begin]


def test_a_group_waits_for_a_late_rank() -> None:
    for value, seconds in run_ranks(starts_with_one_late, 2, 0.5, timeout=60):
        assert value == 2 and seconds >= 1


@pytest.mark.long
def test_a_group_waits_longer_than_gloo_does() -> None:
    assert [value for value, _ in run_ranks(starts_with_one_late, 2, 40.0, timeout=150)] == [2, 2]


def waits_for_nobody() -> str:
    import paddle.distributed as dist

    from paddle_dp.errors import JobError
    from paddle_dp.gloo import install
    from paddle_dp.mesh import join

    mesh = join()
    install("cpu", patience=1.0)
    if mesh.rank == 1:
        time.sleep(1.5)  # never comes to the second group
        return ""
    try:
        dist.new_group([0, 1])
    except JobError as error:
        return str(error)
    return "it started alone"


def test_a_missing_rank_is_named_when_patience_ends() -> None:
    said = run_ranks(waits_for_nobody, 2, timeout=60)[0]
    assert "gloo group" in said and "rank 0 (member 0 of 0 to 1) waited 1 s for members [1]" in said


def seconds_for_groups(count: int) -> float:
    import paddle.distributed as dist

    from paddle_dp.gloo import install
    from paddle_dp.mesh import join

    install("cpu")
    join()
    begin = time.monotonic()
    for _ in range(count):
        dist.new_group([0, 1])
    return (time.monotonic() - begin) / count


def test_a_group_starts_soon() -> None:
    """Paddle's own new_group takes 0.27 s, most of it in delays that the stores no longer have."""
    assert min(run_ranks(seconds_for_groups, 2, 8, timeout=60)) < 0.15
