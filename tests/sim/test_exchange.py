"""Buckets of gradients on the device: the bits of the sum of two ranks, whatever the model does."""

from __future__ import annotations

import pytest

from tests.parallel.hard import learn
from tests.ranks import run_ranks


@pytest.mark.long
@pytest.mark.parametrize("owners", [False, True])
def test_buckets_have_the_sum_of_two_ranks_bit_by_bit(owners: bool) -> None:
    for found in run_ranks(learn, 2, owners):
        assert not any(found)
