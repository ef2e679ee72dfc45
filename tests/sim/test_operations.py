"""The device computes what the CPU computes: its kernels are the CPU's, lent without copies."""

from __future__ import annotations

from tests.ranks import run_ranks
from tests.sim.operations import compared


def test_operations_and_optimizers_give_the_same_bits_as_on_the_cpu() -> None:
    assert run_ranks(compared, 1) == [{}]
