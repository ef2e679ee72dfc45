"""Schedules as arithmetic: against Paddle's own, and the warm-up, scaling and ends that Paddle's do not have."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from paddle_dp.errors import RecipeError
from paddle_dp.recipe import read_recipe
from paddle_dp.schedules import (
    constant,
    cosine,
    inverse_sqrt,
    milestones,
    one_cycle,
    plateau,
    polynomial,
    wsd,
)
from paddle_dp.units import Length

SETTING = {"steps": 100, "steps_per_epoch": 10, "batch": 64}
ALL: dict[str, Any] = {
    "constant": constant.Config,
    "cosine": cosine.Config,
    "polynomial": polynomial.Config,
    "wsd": wsd.Config,
    "inverse_sqrt": inverse_sqrt.Config,
    "milestones": lambda **more: milestones.Config(milestones=lengths("3 epochs", "70 steps"), **more),
}


def lengths(*texts: str) -> tuple[Length, ...]:
    return tuple(map(Length.parse, texts))


def rates(config: Any, **changed: int) -> list[float]:
    setting = {**SETTING, **changed}
    return [config.rate(step, **setting) for step in range(setting["steps"])]


def walk(schedule: Any, steps: int = 100) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(schedule())
        schedule.step()
    return seen


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        (cosine.Config(learning_rate=0.5, floor=0.1), "CosineAnnealingDecay", {"T_max": 100, "eta_min": 0.05}),
        (ALL["milestones"](learning_rate=0.5, factor=0.2), "MultiStepDecay", {"milestones": [30, 70], "gamma": 0.2}),
        *((polynomial.Config(learning_rate=0.5, floor=0.1, power=power), "PolynomialDecay",
           {"decay_steps": 100, "end_lr": 0.05, "power": power}) for power in (1.0, 2.0, 0.5)),
    ],
)  # fmt: skip
def test_rates_are_paddles(ours: Any, theirs: str, settings: dict[str, Any]) -> None:
    from paddle.optimizer import lr

    assert rates(ours) == pytest.approx(walk(getattr(lr, theirs)(0.5, **settings)))


@pytest.mark.parametrize(("shape", "paddles"), [("cosine", "cos"), ("linear", "linear")])
@pytest.mark.parametrize("steps", [10, 100, 173])
def test_one_cycle_is_paddles(shape: str, paddles: str, steps: int) -> None:
    from paddle.optimizer.lr import OneCycleLR

    theirs = OneCycleLR(
        0.5, total_steps=steps, divide_factor=20, end_learning_rate=0.005, phase_pct=0.3,
        anneal_strategy=paddles,
    )  # fmt: skip
    config = one_cycle.Config(learning_rate=0.5, start=0.05, floor=0.01, shape=shape)
    ours = rates(config, steps=steps)
    assert ours == pytest.approx(walk(theirs, steps))
    assert (ours[0], max(ours), ours[-1]) == pytest.approx((0.025, 0.5, 0.005), rel=0.01)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("rise", [0.01, 0.5, 1.0])
def test_the_shortest_cycles_have_rates(steps: int, rise: float) -> None:
    seen = rates(one_cycle.Config(learning_rate=0.5, rise=rise), steps=steps)
    assert all(0 < rate <= 0.5 for rate in seen)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (
            one_cycle,
            {"warmup": Length.parse("5 steps")},
            "warmup: one_cycle rises by itself: set rise and start",
        ),
        (milestones, {"milestones": ()}, "milestones: "),
        (plateau, {"factor": 1.0}, "factor: 1 is not below 1"),
    ],
)
def test_a_setting_that_makes_no_schedule_is_a_mistake(
    kind: Any, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        kind.Config(learning_rate=0.1, **settings)


def test_inverse_sqrt_is_paddles_noam_decay() -> None:
    from paddle.optimizer.lr import NoamDecay

    theirs = walk(NoamDecay(64, warmup_steps=21, learning_rate=1.0), 101)[1:]  # the first one has rate 0
    config = inverse_sqrt.Config(learning_rate=(64 * 21) ** -0.5, warmup=Length.parse("20 steps"))
    assert rates(config) == pytest.approx(theirs)


def test_inverse_sqrt_can_hold_as_t5s_does() -> None:
    config = inverse_sqrt.Config(learning_rate=10**-0.5, hold=Length.parse("9 steps"))
    assert rates(config) == pytest.approx([max(n, 10) ** -0.5 for n in range(1, 101)])


@pytest.mark.parametrize("shape", ["linear", "1-sqrt"])
def test_wsd_is_stable_and_then_decays(shape: str) -> None:
    config = wsd.Config(learning_rate=0.5, warmup=Length.parse("20 steps"), decay=0.4, floor=0.1, shape=shape)
    passed = [max(0, step - 59) / 41 for step in range(20, 100)]
    falls = [1 - (share if shape == "linear" else share**0.5) for share in passed]
    assert rates(config)[20:] == pytest.approx([0.5 * (0.1 + 0.9 * fall) for fall in falls])
    assert set(rates(config)[20:60]) == {0.5}
    assert config.rate(1000, **SETTING) == pytest.approx(0.05)


@pytest.mark.parametrize("shape", ["linear", "1-sqrt"])
def test_every_update_of_wsds_decay_is_below_the_peak_and_above_0(shape: str) -> None:
    """MiniCPM (arXiv:2404.06395): eta f(s - T) for s > T, with 0 < f <= 1 and falling."""
    seen = rates(wsd.Config(learning_rate=1.0, decay=0.2, shape=shape))
    assert seen[:80] == [1.0] * 80
    assert all(1.0 >= before > after > 0 for before, after in pairwise(seen[79:]))


def test_wsd_never_decays_before_its_warm_up_is_over() -> None:
    seen = rates(wsd.Config(learning_rate=0.5, warmup=Length.parse("90 steps"), decay=1.0))
    assert seen[90] == 0.5 == max(seen)


@pytest.mark.parametrize("name", ALL)
def test_the_warm_up_is_paddles_without_its_update_at_rate_0(name: str) -> None:
    from paddle.optimizer.lr import LinearWarmup

    config = ALL[name](learning_rate=0.5, warmup=Length.parse("2 epochs"), warmup_from=0.2)
    theirs = walk(LinearWarmup(0.5, warmup_steps=21, start_lr=0.1, end_lr=0.5), 21)
    assert rates(config)[:20] == pytest.approx(theirs[1:])
    assert rates(config)[20] == pytest.approx(0.5)
    assert min(rates(ALL[name](learning_rate=0.5, warmup=Length.parse("2 epochs")))[:20]) > 0


@pytest.mark.parametrize("name", ["cosine", "polynomial"])
def test_what_falls_begins_to_fall_when_the_warm_up_is_over(name: str) -> None:
    after = rates(ALL[name](learning_rate=0.5, floor=0.1, warmup=Length.parse("20 steps")))[20:]
    assert after == pytest.approx(rates(ALL[name](learning_rate=0.5, floor=0.1), steps=80))


def test_milestones_are_counted_from_the_start_warm_up_included() -> None:
    seen = rates(ALL["milestones"](learning_rate=1.0, warmup=Length.parse("1 epoch")))
    assert [seen[step] for step in (10, 29, 30, 69, 70, 99)] == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize("name", ALL)
def test_the_rate_follows_the_batch_on_request(name: str) -> None:
    plain, scaled = ALL[name](learning_rate=0.1), ALL[name](learning_rate=0.1, per_batch=256)
    assert rates(scaled, batch=1024) == pytest.approx([4 * rate for rate in rates(plain)])
    assert rates(plain, batch=1024) == rates(plain)


@pytest.mark.parametrize("name", ["cosine", "polynomial"])
def test_training_on_past_the_end_stays_at_the_floor(name: str) -> None:
    assert ALL[name](learning_rate=0.5, floor=0.1).rate(1000, **SETTING) == pytest.approx(0.05)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("steps", [1, 2, 20, 21])
def test_a_run_cut_short_within_its_warm_up_has_rates(name: str, steps: int) -> None:
    seen = rates(ALL[name](learning_rate=0.5, warmup=Length.parse("2 epochs")), steps=steps)
    assert all(0 < rate <= 0.5 for rate in seen)
    assert seen == sorted(seen)


@pytest.mark.parametrize("name", [*ALL, "one_cycle"])
def test_what_is_built_gives_the_rates_and_goes_on_from_json(name: str) -> None:
    if name == "one_cycle":
        config = one_cycle.Config(learning_rate=0.5, per_batch=32)
    else:
        config = ALL[name](learning_rate=0.5, warmup=Length.parse("1 epoch"), per_batch=32)
    schedule = config.build(**SETTING)
    assert walk(schedule, 37) == rates(config)[:37]
    state = json.loads(json.dumps(schedule.state_dict()))
    resumed = config.build(**SETTING)
    resumed.set_state_dict(state)
    assert walk(resumed, 63) == rates(config)[37:]


# The schedule that waits for a score ----------------------------------------------------------------------------------


def plateau_schedule(**settings: Any) -> Any:
    return plateau.Config(**{"learning_rate": 0.5, **settings}).build(**SETTING)


SCORES = [
    3.0, 2.0, 2.5, 1.9999, 1.99, 2.2, 2.2, 2.2, 1.0, 1.1, 1.2, 0.99999, 1.3, 1.2, 1.1, 1.1, 1.1, 1.1, 1.05,
]  # fmt: skip


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize(("threshold", "threshold_mode"), [(1e-4, "rel"), (0.05, "abs"), (0.0, "rel")])
@pytest.mark.parametrize(
    ("patience", "cooldown", "floor"), [(0, 0, 0.0), (1, 0, 0.0), (2, 1, 0.0), (0, 2, 0.2)]
)
def test_plateau_is_paddles_on_the_same_numbers(
    mode: str, threshold: float, threshold_mode: str, patience: int, cooldown: int, floor: float
) -> None:
    from paddle.optimizer.lr import ReduceOnPlateau

    more: dict[str, Any] = {
        "mode": mode, "factor": 0.3, "patience": patience, "threshold": threshold,
        "threshold_mode": threshold_mode, "cooldown": cooldown,
    }  # fmt: skip
    theirs, ours = (
        ReduceOnPlateau(0.5, min_lr=0.5 * floor, epsilon=0.0, **more),
        plateau_schedule(floor=floor, **more),
    )
    falls = 0
    for score in SCORES:
        falls += ours.observe(score)
        theirs.step(score)
        assert ours() == pytest.approx(theirs(), rel=1e-14)
        assert (ours.best, ours.bad_evaluations) == (theirs.best, theirs.num_bad_epochs)
        assert ours.cooldown_left == theirs.cooldown_counter
        for _ in range(3):
            ours.step()
        assert ours() == pytest.approx(theirs(), rel=1e-14)
    assert falls >= 2


def test_plateau_goes_on_from_json_in_the_midst_of_its_patience() -> None:
    settings = {"factor": 0.5, "patience": 1, "cooldown": 1}
    for cut in range(len(SCORES)):
        ours, resumed = plateau_schedule(**settings), plateau_schedule(**settings)
        for score in SCORES[:cut]:
            ours.step()
            ours.observe(score)
        resumed.set_state_dict(json.loads(json.dumps(ours.state_dict())))
        for score in SCORES[cut:]:
            for each in (ours, resumed):
                each.step()
                each.observe(score)
            assert resumed() == ours() and resumed.state_dict() == ours.state_dict()


def test_plateau_knows_which_numbers_should_fall() -> None:
    rising = [0.1, 0.2, 0.3]
    for watch, falls in (("acc1", [False] * 3), ("ema_loss", [False, True, True])):
        schedule = plateau_schedule(watch=watch, patience=0)
        assert [schedule.observe(score) for score in rising] == falls


def test_a_plateau_within_the_warm_up_does_not_count() -> None:
    schedule = plateau_schedule(warmup=Length.parse("4 steps"), patience=0, factor=0.5)
    seen = []
    for score in (1.0, 2.0, 2.0, 2.0, 3.0, 4.0):
        schedule.step()
        schedule.observe(score)
        seen.append(schedule())
    assert seen == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.25, 0.125])


@pytest.mark.parametrize("strategy", ["async_average", "parameter_server"])
def test_a_recipe_with_plateau_needs_ranks_that_wait(strategy: str) -> None:
    settings = ["schedule={use: plateau, learning_rate: 0.1}", "strategy={use: parameter_server, mode: sync}"]
    read_recipe("configs/digits_mlp.yaml", settings)
    settings[1] = f"strategy={{use: {strategy}{', mode: async' * (strategy == 'parameter_server')}}}"
    with pytest.raises(RecipeError, match=f"ranks of {strategy} do not wait for one another"):
        read_recipe("configs/digits_mlp.yaml", settings)
