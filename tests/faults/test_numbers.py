"""Numbers that go wrong on one rank: the guard sees them before a weight is changed, and says where they come from."""

from __future__ import annotations

import json
import time

import pytest

RECIPE = "tests/faults/numbers.yaml"
NAN = "callbacks.0.nan=true"
PIPELINE = "strategy={use: hybrid, pipeline: 2}"
TENSOR = "strategy={use: hybrid, tensor: 2, pipeline: 2}"


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("layout", "ranks", "rank", "overrides", "where"),
    [
        ("data 2", 2, 1, [], r"blocks\.3\.out"),
        ("pipeline 2", 2, 0, [PIPELINE], r"blocks\.1\.\w+"),
        ("tensor 2, pipeline 2", 4, 2, [TENSOR], r"blocks\.\d\.\w+"),
    ],
)
def test_a_nan_ends_the_training_at_that_step_and_its_layer_is_named(
    start, cause_named, layout, ranks, rank, overrides, where
):
    job = start("train", ranks=ranks, recipe=RECIPE, overrides=[*overrides, NAN, f"callbacks.0.rank={rank}"])
    pattern = rf"the loss is nan at step 7: this update was not made .* is from {where}: .* on rank {rank}"
    fault = f"rank {rank}, {layout}: a NaN in a layer's output (guard: stop)"
    cause_named(job, fault, 1, pattern, measured=False)
    assert sorted(path.name for path in job.out.glob("checkpoints/step-*")) == ["step-00000004"]


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_after_a_nan_the_training_goes_on(start, found, action):
    job = start("train", recipe=RECIPE, overrides=[NAN, "callbacks.0.times=2", f"guard.non_finite={action}"])
    ended, said, complained = job.finish(timeout=110)
    lines = [json.loads(line) for line in (job.out / "metrics.jsonl").read_text().splitlines()]
    refused = [line for line in lines if line["event"] == "refused"]
    named = bool(refused) and refused[0]["refused_step"] == 7
    done = "the update was skipped" if action == "skip" else "back to the checkpoint of step 4"
    named = named and f"step 7: the loss is nan: {done}" in said + complained
    seconds = job.seconds_from_fault() - (time.time() - refused[0]["time"])
    steps = [line["step"] for line in lines if line["event"] == "step"]
    undone = set(range(1, 41)) - {7} - set(steps)
    found(
        f"rank 1, data 2: a NaN in a layer's output (guard: {action})",
        seconds,
        named,
        phase="forward",
        cost=str(len(undone)),
    )
    assert len(steps) == len(set(steps)) == 39
    assert named and ended == 0, complained


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_rank_that_computes_one_bit_wrong_is_outvoted(start, cause_named):
    job = start("train", ranks=3, recipe=RECIPE, overrides=["guard.recompute=every 5 steps"])
    pattern = r"after step 10: rank 1 \(\S+\) computed other bits than the other data ranks"
    fault = "rank 1 of 3 computes one bit wrong from step 7 on (guard: recompute every 5 steps)"
    cause_named(job, fault, 1, pattern, measured=False)
