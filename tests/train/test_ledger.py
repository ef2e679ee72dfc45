import random

import pytest

from paddle_dp.train.ledger import Assignments, means

SUMS = {"loss": 6.0, "acc1": 2.0, "count": 4.0, "gradient_norm": 3.0}


def test_shares_are_handed_out_in_order_and_once():
    ledger = Assignments(3, 5, 3)
    asked = [ledger.claim(rank) for rank in (0, 2, 1, 1, 0, 2, 2)]
    assert asked == [(3, 0), (3, 1), (3, 2), (4, 0), (4, 1), (4, 2), None]
    assert not ledger.is_done
    for rank, share in zip((0, 2, 1, 1, 0, 2), asked, strict=False):
        ledger.done(rank, share, None)
    assert ledger.is_done


@pytest.mark.parametrize(("claimed", "stop"), [(0, 2), (1, 3), (3, 3), (4, 4)])
def test_a_cut_ends_the_round_with_the_global_batch_that_was_begun(claimed, stop):
    ledger = Assignments(2, 9, 3)
    for _ in range(claimed):
        ledger.claim(0)
    ledger.cut()
    assert ledger.stop == stop
    left = list(iter(lambda: ledger.claim(1), None))
    assert len(left) == 3 * (stop - 2) - claimed


def test_a_rank_that_is_gone_leaves_its_shares_to_others():
    ledger = Assignments(0, 2, 2)
    mine, theirs = ledger.claim(0), ledger.claim(1)
    ledger.done(0, mine, SUMS)
    ledger.gone(1)
    assert ledger.claim(0) == theirs
    ledger.done(1, theirs, SUMS)  # too late: it counts once
    assert len(ledger._sums) == 1
    ledger.done(0, theirs, SUMS)
    for share in iter(lambda: ledger.claim(0), None):
        ledger.done(0, share, SUMS)
    assert ledger.is_done


def test_a_slow_rank_gets_none_of_the_last_shares():
    """Rank 2 takes 5 s for a share, ranks 0 and 1 take 1 s: nobody waits for it at the end, but it for them."""
    ledger = Assignments(0, 10, 3, {0: 1.0, 1: 1.0, 2: 5.0})
    at, claimed, ended = {0: 0.0, 1: 0.0, 2: 0.0}, {0: [], 1: [], 2: []}, {}
    while at:
        rank = min(at, key=lambda r: (at[r], r))
        share = ledger.claim(rank)
        if share is None:
            ended[rank] = at.pop(rank)
            continue
        claimed[rank].append(share)
        at[rank] += ledger.pace[rank]
        ledger.done(rank, share, None)
    assert ledger.is_done
    assert ended[2] <= min(ended[0], ended[1])
    assert len(claimed[2]) >= 2


def test_the_last_rank_that_asks_is_never_refused():
    ledger = Assignments(0, 2, 2, {0: 9.0, 1: 1.0})
    assert ledger.claim(0) and ledger.claim(1)
    assert ledger.claim(0) is None, "rank 1 will have done it before"
    ledger.gone(1)
    assert len(list(iter(lambda: ledger.claim(0), None))) == 3


def test_paces_are_means_of_what_ranks_took():
    ledger = Assignments(0, 2, 2)
    for seconds in (9.0, 2.0, 4.0):  # the first share of a round begins with what is done once
        ledger.done(0, ledger.claim(0), None, seconds)
    assert ledger.pace == ledger.known_pace() == {0: 3.0}


def test_a_rank_that_was_refused_all_the_round_is_tried_again_in_the_next():
    ledger = Assignments(0, 1, 2, {0: 1.0, 1: 60.0})
    ledger.claim(0)
    assert ledger.claim(1) is None
    ledger.done(0, (0, 0), None, 1.0)
    again = Assignments(1, 2, 2, ledger.known_pace())
    again.claim(0)
    assert again.claim(1) == (1, 1)


def test_whatever_the_order_each_share_is_computed_once():
    rng = random.Random(0)
    for _ in range(50):
        ledger, held, done = Assignments(0, rng.randint(1, 6), rng.randint(1, 4)), {0: [], 1: [], 2: []}, []
        while not ledger.is_done:
            rank = rng.randrange(3)
            if held[rank] and rng.random() < 0.6:
                share = held[rank].pop(0)
                ledger.done(rank, share, None)
                done.append(share)
            elif (share := ledger.claim(rank)) is not None:
                held[rank].append(share)
            if rng.random() < 0.03:
                ledger.cut()
        assert len(set(done)) == len(done)
        assert set(done) == {(batch, share) for batch in range(ledger.stop) for share in range(ledger.shares)}


def test_means_are_over_what_counts_and_told_once():
    assert means([]) == {}
    other = {"loss": 1.0, "acc1": 0.0, "count": 12.0, "gradient_norm": 1.0}
    assert means([SUMS, other]) == {"loss": 7 / 16, "acc1": 2 / 16, "gradient_norm": (48 / 16) ** 0.5}
    ledger = Assignments(0, 3, 1)
    for _ in range(3):
        ledger.done(0, ledger.claim(0), SUMS)
    assert ledger.reported(1)["loss"] == 1.5
    assert ledger.reported(1) == {}
    assert ledger.reported(2)["acc1"] == 0.5


def test_who_was_told_that_there_is_nothing_left_hears_of_what_a_dead_rank_leaves():
    ledger = Assignments(0, 1, 2)
    ledger.claim(0), ledger.claim(1)
    assert ledger.claim(2) is None and not ledger.has_more
    ledger.gone(1)
    assert ledger.has_more and ledger.claim(2) == (0, 1) and not ledger.has_more
