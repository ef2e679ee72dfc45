import pytest

from paddle_dp.strategies._rounds.periods import Periods


def ends(periods: Periods, rates: list[float], done: int = 0) -> list[int]:
    """The updates behind which weights are averaged, as a learner asks."""
    found, began = [], False
    for update, rate in enumerate(rates[done:], start=done + 1):
        periods.see(rate)
        if not periods.is_local(update):
            continue
        if not began:
            began = True
            periods.begin(update - 1, rate)
        if periods.is_over(update):
            found.append(update)
            periods.begin(update, rate)
    return found


def test_every_so_many_updates_behind_the_warm_up():
    assert ends(Periods(4), [1.0] * 13) == [4, 8, 12]
    assert ends(Periods(4, warmup=6), [1.0] * 20) == [10, 14, 18]
    assert ends(Periods(1), [1.0] * 3) == [1, 2, 3]


@pytest.mark.parametrize("done", [7, 9, 10])
def test_they_are_the_same_updates_wherever_a_training_was_resumed(done):
    whole = ends(Periods(4, warmup=6), [1.0] * 30)
    assert ends(Periods(4, warmup=6), [1.0] * 30, done) == [update for update in whole if update > done]


def test_a_period_grows_with_the_root_of_the_rate_s_fall():
    """ceil(4 · sqrt(r_max / r)): 4, 6 at a rate of 4/9, 8 at a quarter; 8 times as long at most."""
    periods = Periods(4, adaptive=True)
    periods.see(0.9)
    assert [periods.length(rate) for rate in (0.9, 0.4, 0.225, 0.9 / 64, 1e-9, 0.0)] == [4, 6, 8, 32, 32, 32]
    assert ends(Periods(2, adaptive=True), [1.0] * 4 + [0.25] * 20) == [2, 4, 6, 10, 14, 18, 22]


def test_what_is_saved_goes_on():
    periods = Periods(3, adaptive=True)
    assert ends(periods, [1.0, 0.5, 0.5, 0.5])
    again = Periods(3, adaptive=True)
    again.load(periods.state())
    assert (again.ends, again.highest) == (periods.ends, periods.highest)
