"""Scaling is arithmetic on measured steps: what was measured stays, and what is foretold follows from its formula."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log2

import pytest

from paddle_dp.plan.published_scaling import PUBLISHED
from paddle_dp.plan.scaling import (
    HIDDEN_SHARE,
    JITTER,
    LINK_SHARE,
    MeasuredSteps,
    ScalingModel,
    ring_share,
    step_beyond,
)
from tools.planner.published_rows import published_rows
from tools.planner.scaling import series


def steps(ranks: int, samples: float, seconds: float) -> MeasuredSteps:
    return MeasuredSteps(ranks=ranks, samples=samples, seconds=seconds, low=0.9 * seconds, high=1.2 * seconds)


# Alone 10 ms and 1 ms a sample; together 2 ranks take 20 % from each other, and 3 ms for the exchange of 4 MB.
MODEL = ScalingModel(
    single=[steps(1, 64, 0.074), steps(1, 32, 0.042)],
    together=[steps(2, 64, 1.2 * 0.074 + 0.003), steps(2, 32, 1.2 * 0.042 + 0.003)],
    ranks=2, crowding=1.2, exchange=0.004, halved=0.7, size=4e6, node=2, link=125e6, hides=False, bar=1.28,
)  # fmt: skip


def test_a_measured_step_is_shown_as_it_was_measured() -> None:
    for measured in (*MODEL.single, *MODEL.together):
        shown = MODEL.step(measured.ranks, measured.samples)
        assert (shown.kind, shown.seconds, shown.low, shown.high) == (
            "measured", measured.seconds, measured.low, measured.high,
        )  # fmt: skip
        assert shown.rate == measured.ranks * measured.samples / measured.seconds


def test_one_rank_is_a_line_through_two_batches() -> None:
    assert MODEL.alone(16) == pytest.approx(0.026) and MODEL.alone(128) == pytest.approx(0.138)
    single = replace(MODEL, single=MODEL.single[:1])
    assert single.alone(32) == pytest.approx(0.037)  # in proportion
    noisy = replace(MODEL, single=[steps(1, 64, 0.074), steps(1, 32, 0.080)])
    assert noisy.alone(16) == 0.074  # fewer samples do not take longer
    steep = replace(MODEL, single=[steps(1, 64, 0.074), steps(1, 32, 0.010)])
    assert steep.alone(16) == pytest.approx(0.074 / 4)  # nor less than in proportion


def test_turns_are_compared_pair_by_pair() -> None:
    """A machine that becomes twice as slow on its way does so for both."""
    alone, pair = [1.0, 1.0, 2.0, 2.0, 4.0], [1.25, 1.25, 2.5, 2.5, 5.0]
    ratio, low, high = MeasuredSteps.from_rounds(2, 8, pair).times(MeasuredSteps.from_rounds(1, 8, alone))
    assert (ratio, low, high) == pytest.approx((1.6, 1.6, 1.6))
    assert MODEL.together[0].times(MODEL.single[0])[1] < MODEL.together[0].times(MODEL.single[0])[0]


def test_losses_are_split_into_crowding_and_exchange() -> None:
    for measured in MODEL.together:
        crowd, exchange = MODEL.losses(measured)
        assert crowd == pytest.approx(0.2 * MODEL.alone(measured.samples))
        assert exchange == pytest.approx(0.003)
    fast = replace(MODEL, together=[steps(2, 64, 0.070)])  # faster than alone: noise is no gain
    assert fast.losses(fast.together[0]) == (0.0, 0.0)


def test_the_measured_ranks_are_foretold_from_one_rank_and_the_collectives() -> None:
    seconds, low, high = MODEL.from_single(64)
    hidden = 1.2 * 0.074
    assert seconds == pytest.approx(hidden + 0.004)
    assert (low, high) == pytest.approx((0.9 * hidden, 1.2 * hidden + 0.004))
    on_cards = replace(MODEL, hides=True, exchange=0.050)
    assert on_cards.from_single(64)[0] == pytest.approx(hidden + 0.050 - HIDDEN_SHARE * hidden)


@pytest.mark.parametrize("samples", [64.0, 16.0])
def test_beyond_the_machine_the_network_counts(samples: float) -> None:
    alone, machines = MODEL.alone(samples), 4
    exchange = 0.003 * 1.0  # a ring of 2 ranks within a machine
    ring = 2 * (machines - 1) / machines * 4e6 / (LINK_SHARE * 125e6)
    foretold = MODEL.step(8, samples)
    assert foretold.kind == "foretold"
    assert foretold.seconds == pytest.approx(alone + 0.2 * alone + exchange + ring + JITTER * alone * 2)
    assert foretold.low == pytest.approx(foretold.seconds * 0.9 / 1.28)
    assert foretold.high == pytest.approx(foretold.seconds * 1.2 * 1.28)
    assert foretold.sent == pytest.approx(2 * 7 / 8 * 4e6)


def test_more_ranks_of_one_machine_share_its_links() -> None:
    wide = replace(MODEL, node=8)
    alone = MODEL.alone(64)
    expected = alone * 1.2 + 0.003 * ring_share(8) / ring_share(2) + JITTER * alone * log2(4)
    assert wide.step(8, 64).seconds == pytest.approx(expected)
    assert wide.step(16, 64).seconds > expected


def test_an_exchange_hides_only_where_the_measured_ranks_show_it() -> None:
    cards = replace(MODEL, hides=True, crowding=1.0, together=[steps(2, 64, 0.0745)], link=1e9)
    shown = cards.step(4, 64)
    ring = 1.0 * 4e6 / (LINK_SHARE * 1e9)
    assert ring < HIDDEN_SHARE * 0.074 and shown.seconds == pytest.approx(0.0745 + JITTER * 0.074)
    slow = replace(cards, together=[steps(2, 64, 0.080)])
    assert slow.step(4, 64).seconds == pytest.approx(0.080 + ring + JITTER * 0.074)


def test_without_a_network_or_collectives_there_is_a_bound_and_no_forecast() -> None:
    unlinked = replace(MODEL, link=None).step(8, 64)
    assert (unlinked.kind, unlinked.high) == ("bound", inf)
    assert unlinked.seconds <= MODEL.step(8, 64).seconds
    lonely = replace(MODEL, together=[], link=None)
    assert lonely.step(8, 64).kind == "bound" and lonely.step(8, 64).seconds == MODEL.alone(64)
    linked = replace(MODEL, together=[], link=1e6)
    assert linked.step(8, 64).seconds == pytest.approx(2 * 7 / 8 * 4e6 / 1e6)


def test_half_the_bytes_take_half_the_exchange() -> None:
    """Over the network; among the measured ranks as much as the collectives of both sizes say."""
    plain, halved = (MODEL.step(8, 64, half=half) for half in (False, True))
    ring = 1.5 * 4e6 / (LINK_SHARE * 125e6)
    assert plain.seconds - halved.seconds == pytest.approx(0.3 * 0.003 + ring / 2)
    assert MODEL.step(2, 64, half=True).kind == "foretold"


def test_the_formula_is_that_of_the_exam() -> None:
    assert step_beyond(1.0, 0.1, 0.3, 2.0, overlaps=False) == pytest.approx(1.4 + 2 * JITTER)
    assert step_beyond(1.0, 0.0, 0.3, 1.0, overlaps=True) == pytest.approx(1.0 + JITTER)


def test_published_series_are_those_of_the_exam() -> None:
    exam = [*series(published_rows())]
    assert len(exam) == len(PUBLISHED)
    for ours, theirs in zip(PUBLISHED, exam, strict=True):
        assert (ours.owner, ours.size, ours.link, ours.strong) == (
            theirs.owner, theirs.size, theirs.link, theirs.strong,
        )  # fmt: skip
        assert ours.name == theirs.name.replace(" (tokens/s)", "")
        assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-4)
    resnet = next(each for each in PUBLISHED if each.name == "ResNet-50 fp32, batch 256 a card")
    assert round(resnet.efficiencies()[32], 3) == 0.872  # the textbooks' figure is 0.8
