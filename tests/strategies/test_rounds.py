"""The parts of ranks that learn alone: when they meet, which states are averaged, and the outer optimizer's step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.strategies._rounds.periodic_means import OuterMomentum
from paddle_dp.strategies._rounds.periods import LocalStates, Periods


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


class TwoRanks:
    """This rank, and another one whose numbers are larger by 2, with the same weight in means."""

    def gather(self, mine: Any) -> list[Any]:
        if mine and isinstance(mine[0], float):
            return [
                mine,
                [mine[0], {name: (np.array(value) + 2).tolist() for name, value in mine[1].items()}],
            ]
        return [mine, mine]


def test_what_has_not_a_parameter_s_shape_is_no_gradient_of_it() -> None:
    """ASGD keeps the gradients of several steps, [steps, …], and a number of steps, which is whole."""
    weight = paddle.create_parameter([3, 2], "float32")
    states = {
        "d": paddle.ones([3, 2]),
        "y": paddle.zeros([4, 3, 2]),
        "m": paddle.to_tensor([5]),
        "beta1_pow_acc": paddle.to_tensor([0.5]),
    }
    optimizer = SimpleNamespace(_accumulators={kind: {weight.name: state} for kind, state in states.items()})
    own = LocalStates(optimizer, [("weight", weight)], TwoRanks())  # type: ignore[arg-type]
    assert [[one is not None for one in kind] for kind in own.by_kind()] == [[True], [False], [False]]
    assert sorted(own.counts()) == ["weight/beta1_pow_acc", "weight/m", "weight/y"]
    own.average_counts(0.5)
    assert states["m"].tolist() == [6] and states["beta1_pow_acc"].tolist() == [1.5]
    np.testing.assert_array_equal(states["y"].numpy(), np.ones([4, 3, 2]))
    np.testing.assert_array_equal(states["d"].numpy(), np.ones([3, 2]))


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_momentum_is_paddle_s(nesterov):
    """paddle.optimizer.Momentum is the same formula; its rate is a float32, so it is an exact one here."""
    weight = paddle.create_parameter([3], "float64")
    weight.set_value(paddle.to_tensor([1.0, -2.0, 0.5], "float64"))
    momentum = paddle.optimizer.Momentum(0.75, 0.875, [weight], use_nesterov=nesterov)
    outer = OuterMomentum(learning_rate=0.75, momentum=0.875, nesterov=nesterov)
    ours = weight.detach().clone()
    outer.begin([ours])
    for step in range(4):
        gradient = paddle.to_tensor([0.1 * step, -0.3, 1.0 / (step + 1)], "float64")
        ours.subtract_(outer.step(0, gradient))
        weight.grad = gradient
        momentum.step()
        np.testing.assert_allclose(ours.numpy(), weight.numpy(), rtol=1e-14)


def test_without_momentum_and_with_rate_1_an_outer_step_is_the_plain_mean():
    outer = OuterMomentum(learning_rate=1.0, momentum=0.0, nesterov=False)
    outer.begin([paddle.zeros([2])])
    for values in ([0.5, -1.0], [0.25, 3.0]):
        assert outer.step(0, paddle.to_tensor(values)).tolist() == values
