"""The time in an exchange is put down to the axis along which it went, once, and to nothing before it is asked for."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from paddle_dp.gloo import stopwatch
from paddle_dp.gloo.stopwatch import MULTIPLE_AXES, Stopwatch, axes_timed, axis_of
from paddle_dp.mesh.degrees import Degrees
from tests.gloo.cases import joined
from tests.ranks import run_ranks

GRID = Degrees(data=2, tensor=2)
LATE = 0.3  # seconds that a peer lets the others wait


def test_the_axis_of_a_group_is_on_which_its_ranks_differ() -> None:
    grid = Degrees(data=2, pipeline=2, tensor=2)
    assert [axis_of(grid, grid.group(5, axis)) for axis in ("data", "pipeline", "tensor")] == [
        "data",
        "pipeline",
        "tensor",
    ]
    assert axis_of(grid, list(range(8))) == MULTIPLE_AXES and axis_of(grid, [3]) == ""
    assert axes_timed(grid) == ["data", "pipeline", "tensor", MULTIPLE_AXES]
    assert axes_timed(Degrees(tensor=4)) == ["tensor"] and axes_timed(Degrees()) == []


def test_an_exchange_within_an_exchange_counts_once_and_a_reading_begins_anew() -> None:
    watch, group = Stopwatch(GRID), SimpleNamespace(id=7, ranks=[0, 1])
    with watch.around(group):
        with watch.around(group):
            time.sleep(0.02)
        time.sleep(0.02)
    (spent,) = watch.read().values()
    assert 0.04 <= spent < 0.06 * 20
    assert watch.read() == {}
    with watch.around(group):
        pass
    assert list(watch.read()) == ["tensor"]


def test_without_the_bridge_nothing_is_measured() -> None:
    assert stopwatch.start(GRID) is None


def measured() -> dict[str, Any]:
    """Exchanges along both axes of a grid of 2 × 2, for which the odd ranks come late, then the last two."""
    import paddle
    import paddle.distributed as dist

    mesh = joined()
    tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][mesh.rank // 2]
    data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][mesh.rank % 2]
    before = dict(vars(type(data.process_group)))
    watch = stopwatch.start(GRID)
    assert watch is not None
    # The stopwatch is an observer: nothing is wrapped a second time.
    untouched = before == dict(vars(type(data.process_group)))
    mesh.sum([1.0])
    watch.read()

    time.sleep(LATE * (mesh.rank % 2))
    number = paddle.full([3], mesh.rank + 1.0)
    dist.all_reduce(number, group=tensor)
    rows: list[Any] = []
    dist.all_gather(rows, paddle.full([1], float(mesh.rank)), group=tensor)
    first = watch.read()

    time.sleep(LATE * (mesh.rank // 2))
    word = paddle.full([2], float(mesh.rank))
    if mesh.rank // 2:
        dist.send(word, mesh.rank - 2, group=data)
    else:
        dist.recv(word, mesh.rank + 2, group=data)
    second = watch.read()
    mesh.sum([1.0])
    sums = [number[0].item(), *(row.item() for row in rows), word[0].item()]
    return {"first": first, "second": second, "last": watch.read(), "sums": sums, "untouched": untouched}


def test_waiting_for_a_late_peer_is_seen_on_its_axis() -> None:
    told = run_ranks(measured, 4)
    assert [one["sums"] for one in told] == [[3, 0, 1, 2], [3, 0, 1, 3], [7, 2, 3, 2], [7, 2, 3, 3]]
    assert all(one["untouched"] for one in told)
    for rank, one in enumerate(told):
        assert (
            set(one["first"]) == {"tensor"}
            and set(one["second"]) <= {"data"}
            and set(one["last"]) == {MULTIPLE_AXES}
        )
        if rank % 2 == 0:
            assert one["first"]["tensor"] > LATE / 2
        if rank < 2:
            assert one["second"]["data"] > LATE / 2
