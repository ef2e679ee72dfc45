"""Gradients exchanged while backward runs: the bits of the sum in the order of ranks, whatever the model does."""

import pytest

from tests.exchange.hard import learn
from tests.ranks import run_ranks


@pytest.mark.parametrize("each_micro_batch", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_owners_have_the_sum_in_the_order_of_ranks_bit_by_bit(ranks, each_micro_batch):
    for found in run_ranks(learn, ranks, True, each_micro_batch):
        assert not any(found)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_all_have_the_sum_in_the_order_of_ranks_bit_by_bit(ranks):
    for found in run_ranks(learn, ranks, False):
        assert not any(found)
