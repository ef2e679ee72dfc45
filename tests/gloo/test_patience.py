"""Exchanges wait for a late rank as long as we say, in C++ too, where Paddle has a fixed 30 s."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.ranks import run_ranks

HERE = "tests/gloo/test_patience.py"


def sum_with_one_late(patience: float, seconds: list[float], bridged: bool) -> list[Any]:
    """Sums of ones, to each of which the last rank comes so late; what came of it, and after how long."""
    from paddle_dp.errors import RunError
    from paddle_dp.gloo import install
    from paddle_dp.mesh import join, rolls

    rolls.Roll.notice, rolls.Roll.still, rolls.Roll.look = 1.0, 0.4, 0.2
    mesh = join(patience=patience)
    if bridged:
        install(mesh.device)
    found: list[Any] = []
    for late in seconds:
        begin = time.monotonic()
        if mesh.rank == mesh.ranks - 1:
            time.sleep(late)
        try:
            said = mesh.sum([1.0])[0]
        except RunError as error:
            said = str(error)
        except (RuntimeError, ValueError) as error:
            said = type(error).__name__
        found.append([said, time.monotonic() - begin])
    return found


@pytest.mark.parametrize("bridged", [False, True])
def test_the_limit_is_the_one_that_was_asked_for(bridged: bool) -> None:
    """With 2 s, a rank that is 0.5 s late is waited for, and one that is 5 s late is not, and named."""
    found = run_ranks(f"{HERE}:sum_with_one_late", 3, 2.0, [0.5, 5.0], bridged)
    for first, second in found[:2]:
        assert first[0] == 3.0
        assert 1.9 < second[1] < 4.5
        assert "for rank 2 in" in str(second[0])


def backward_with_one_late(seconds: float) -> list[float]:
    """DataParallel's gradient, whose exchange is C++ from end to end, with the last rank late to its backward."""
    import paddle

    from paddle_dp.mesh import join

    mesh = join()
    paddle.seed(0)
    model = paddle.DataParallel(paddle.nn.Linear(2, 1))
    loss = model(paddle.full([1, 2], 1.0 + mesh.rank)).sum()
    if mesh.rank == mesh.ranks - 1:
        time.sleep(seconds)
    loss.backward()
    gradient: list[float] = model.parameters()[0].grad.flatten().tolist()
    return gradient


@pytest.mark.long
def test_a_rank_35_s_late_to_its_backward_is_waited_for() -> None:
    assert run_ranks(f"{HERE}:backward_with_one_late", 2, 35.0, timeout=120) == [[1.5, 1.5]] * 2


def test_where_gloo_is_not_found_nothing_is_touched() -> None:
    """This process has no group: the library's own table says so, and no address is followed."""
    from paddle_dp.gloo.time_limit import _Gloo, wait_for

    assert not wait_for(0, 5.0)
    assert _Gloo._read(8, 8) is None
    assert _Gloo._read((1 << 47) - 8, 8) is None
    assert _Gloo._read(12345678901, 8) is None
