"""What goes wrong on a device and not on a CPU is found: a forgotten wait, a wrong bit, a late or stalled exchange."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.proof import SideRunner, compare_sides
from tests.jobs import comparisons_in_forks
from tests.ranks import run_ranks
from tests.sim.recipes import gpt

FORGET = "tests.sim.test_faults:forget_to_wait"


class Forgotten:
    """A task that is on its way still when `wait` returns."""

    def wait(self) -> None:
        pass


def forget_to_wait() -> None:
    """From here on, all_reduce is issued and not waited for. Over gloo it changes nothing: it is done on return."""
    import paddle.distributed as dist

    right = dist.all_reduce

    def issued(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, sync_op: bool = True) -> Any:
        # The gradients; a hang of the small agreements would hide what is to be seen.
        large = tensor.size > 1000
        task = right(tensor, op, group, sync_op and not large)
        return Forgotten() if large else task

    dist.all_reduce = issued


def is_same(folder: Path, words: str, patch: str | None = None) -> bool:
    runner = SideRunner(gpt(folder), ("model.dropout=0",), 2, 2, folder, wide=False)
    with comparisons_in_forks():
        many = runner.run_candidate(2, [words], "many", patch)
        return compare_sides(runner.run_reference([many]), many).same


@pytest.mark.long
def test_a_forgotten_wait_is_seen_on_the_device_and_not_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device").mkdir()
    monkeypatch.setenv("SIM_LATENCY", "0.02")
    assert is_same(tmp_path / "device", "strategy.data=2")
    assert not is_same(tmp_path / "device", "strategy.data=2", FORGET)
    monkeypatch.delenv("CUSTOM_DEVICE_ROOT")
    (tmp_path / "cpu").mkdir()
    assert is_same(tmp_path / "cpu", "strategy.data=2", FORGET)


def exchange(faults: str, sends_first: bool = False) -> list[float]:
    """In a rank: three sums over the ranks under faults, and how long they took; or, where asked, sends in a ring."""
    os.environ["SIM_FAULTS"] = faults
    if sends_first:
        os.environ.update(SIM_SENDS="rendezvous", SIM_TIMEOUT="2")
    import paddle
    import paddle.distributed as dist

    dist.init_parallel_env()
    rank = dist.get_rank()
    begun, found = time.perf_counter(), []
    if sends_first:
        x, y = paddle.ones([4]), paddle.zeros([4])
        dist.send(x, 1 - rank)
        dist.recv(y, 1 - rank)
        return y.tolist()
    for step in range(3):
        x = paddle.full([8], float(rank + step)) @ paddle.ones([8, 1])
        dist.all_reduce(x)
        found.append(x.item())
    return [*found, time.perf_counter() - begun]


@pytest.mark.long
@pytest.mark.parametrize("fault", ["late rank=1 at=2 seconds=0.7", "stall rank=0 at=3 seconds=0.7"])
def test_a_late_or_stalled_exchange_is_late_and_right(fault: str) -> None:
    for *found, seconds in run_ranks(exchange, 2, fault):
        assert found == [8.0, 24.0, 40.0] and seconds > 0.6


@pytest.mark.long
def test_a_device_that_computes_a_bit_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run_ranks(exchange, 2, "flip rank=1 kernel=matmul at=2 bit=22")
    assert [row[0] for row in found] == [8.0, 8.0] and found[0][1] == found[1][1] != 24.0
    assert found[0][2] == 40.0, "once, and not again"
    monkeypatch.setenv("SIM_FAULTS", "flip rank=1 kernel=adamw at=3 bit=22")
    assert not is_same(tmp_path, "strategy.data=2")


@pytest.mark.long
def test_two_ranks_that_both_send_first_stand_still_as_over_nccl() -> None:
    with pytest.raises(AssertionError, match=r"waited 2\.0 s for rank [01] of group .*, in send"):
        run_ranks(exchange, 2, "", sends_first=True)
