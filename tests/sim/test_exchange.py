"""Buckets of gradients on the device: the bits of the sum of two ranks, whatever the model does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.exchange.hard import learn
from tests.house.training import build_trainer, settle
from tests.ranks import run_ranks
from tests.sim.recipes import GPT


@pytest.mark.long
@pytest.mark.parametrize("owners", [False, True])
def test_buckets_have_the_sum_of_two_ranks_bit_by_bit(owners: bool) -> None:
    for found in run_ranks(learn, 2, owners):
        assert not any(found)


def trained(folder: str, overrides: list[str], travel: bool) -> tuple[dict[str, int], int]:
    """In a rank: trains over a slow link; without `travel`, every update waits for its values. Digests of the weights
    and of their averages, and in how many updates values still travelled when the forward began."""
    from paddle_dp.axes.sharding.param_broadcast import AsyncParamBroadcast
    from paddle_dp.core.consistency import digests

    os.environ |= {"SIM_BANDWIDTH": "2e6", "SIM_LATENCY": "1e-3"}
    begin, late = AsyncParamBroadcast.begin, []

    def begun(self: AsyncParamBroadcast) -> None:
        begin(self)
        late.append(len(self._tasks))

    AsyncParamBroadcast.begin = begun  # type: ignore[method-assign]
    trainer = build_trainer(GPT, folder, *overrides)
    learner = trainer.learner
    step = learner.update

    def settled() -> None:
        step()
        learner.weights.wait()

    if not travel:
        learner.update = settled  # type: ignore[method-assign]
    trainer.fit()
    named = {**learner.placed.state(), **{f"average of {n}": a for n, _, a in trainer.averages.named()}}
    found = dict(zip(named, digests(named.values()), strict=True))
    settle(trainer)
    AsyncParamBroadcast.begin = begin  # type: ignore[method-assign]
    return found, sum(map(bool, late))


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2])
def test_values_that_travel_behind_the_next_forward_are_the_same_bits(tmp_path: Path, stage: int) -> None:
    overrides = [
        f"strategy={{use: hybrid, sharding: 2, sharding_stage: {stage}, check_every: 5 steps}}",
        "ema={decay: 0.5, every: 2 steps}",
        "callbacks=[{use: evaluate, every: 3 steps}]",
        "train.length=12 steps",
    ]
    late, again, settled = (
        run_ranks(trained, 2, f"{tmp_path}/{turn}", overrides, travel)
        for turn, travel in enumerate((True, True, False))
    )
    for (bits, often), (repeated, _), (wanted, never) in zip(late, again, settled, strict=True):
        assert bits == wanted == repeated
        assert often >= 3  # not after evaluations, checks and measured steps
        assert not never
