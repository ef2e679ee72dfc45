"""Schedules as arithmetic: against Paddle's own, and the warm-up, scaling and ends that Paddle's do not have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paddle_dp.schedules import constant, cosine, milestones, polynomial
from paddle_dp.units import Length

SETTING = {"steps": 100, "steps_per_epoch": 10, "batch": 64}
ALL: dict[str, Any] = {
    "constant": constant.Config,
    "cosine": cosine.Config,
    "polynomial": polynomial.Config,
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


def test_cosine_is_paddles() -> None:
    from paddle.optimizer.lr import CosineAnnealingDecay

    theirs = walk(CosineAnnealingDecay(0.5, T_max=100, eta_min=0.05))
    assert rates(cosine.Config(learning_rate=0.5, floor=0.1)) == pytest.approx(theirs)


@pytest.mark.parametrize("power", [1.0, 2.0, 0.5])
def test_polynomial_is_paddles(power: float) -> None:
    from paddle.optimizer.lr import PolynomialDecay

    theirs = walk(PolynomialDecay(0.5, decay_steps=100, end_lr=0.05, power=power))
    assert rates(polynomial.Config(learning_rate=0.5, floor=0.1, power=power)) == pytest.approx(theirs)


def test_milestones_are_paddles() -> None:
    from paddle.optimizer.lr import MultiStepDecay

    theirs = walk(MultiStepDecay(0.5, milestones=[30, 70], gamma=0.2))
    assert rates(ALL["milestones"](learning_rate=0.5, factor=0.2)) == pytest.approx(theirs)


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


def test_no_milestones_are_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"^milestones: "):
        milestones.Config(learning_rate=0.1, milestones=())


@pytest.mark.parametrize("name", ALL)
def test_what_is_built_gives_the_rates_and_goes_on_from_json(name: str) -> None:
    config = ALL[name](learning_rate=0.5, warmup=Length.parse("1 epoch"), per_batch=32)
    schedule = config.build(**SETTING)
    assert walk(schedule, 37) == rates(config)[:37]
    state = json.loads(json.dumps(schedule.state_dict()))
    resumed = config.build(**SETTING)
    resumed.set_state_dict(state)
    assert walk(resumed, 63) == rates(config)[37:]
