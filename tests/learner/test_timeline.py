"""Idle time as it is measured on real ranks, against the formula: for work that takes its time and no core.

Blocks that sleep are an accelerator's: what is measured then is the engine and the exchange, and a machine that is busy
with other things changes little. `tools/pipeline_timeline.py` measures work that computes.
"""

import time
from dataclasses import replace
from statistics import median

import paddle
import pytest
from paddle import nn
from paddle.autograd import PyLayer

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.mesh import join
from paddle_dp.part import read_part
from paddle_dp.plan.pipeline_schedule import bubble, idle
from tests.house.learners import task_of
from tests.ranks import run_ranks

FORWARD, BACKWARD, STEPS = 0.02, 0.04, 5  # seconds of a block
CASES = [(schedule, micro_batches) for schedule in ("1f1b", "interleaved") for micro_batches in (2, 4, 8, 16)]


class Slow(PyLayer):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(BACKWARD)
        return gradient.clone()


class Block(nn.Layer):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return Slow.apply(self.inner(x))


class Sleepers(nn.Layer):
    def __init__(self):
        super().__init__()
        self.blocks = nn.LayerList([Block() for _ in range(4)])


def measure(cases):
    """For each case, the median over some steps of each stage's idle share."""
    words = {"use": "hybrid", "pipeline": 2}
    placer = read_part("strategies", words).build(join(seed=0))
    found = []
    for schedule, micro_batches in cases:
        task = task_of(Sleepers(), lambda out, y: ((out - y).square().sum(), len(out)), rate=0.01)
        config = read_part("strategies", {**words, "pipeline_schedule": schedule}).config
        learner = replace(placer, config=config).place(task)
        x = paddle.ones([1, 4])
        batch, shares = Batch((MicroBatch(x, x, 1),) * micro_batches, micro_batches, 0, 0), []
        for step in range(STEPS + 1):
            learner.runner.recorder.armed = step > 0
            learner.train_batch(batch)
            if step:
                shares.append(idle(learner.runner.recorder.recordings()[0].spans, 2))
        found.append([median(each) for each in zip(*shares, strict=True)])
    return found


@pytest.mark.long
def test_measured_idle_time_is_the_formulas():
    measured = run_ranks(measure, 2, CASES, timeout=300)[0]
    for (schedule, micro_batches), shares in zip(CASES, measured, strict=True):
        predicted = bubble(2, micro_batches, 2 if schedule == "interleaved" else 1)
        print(schedule, micro_batches, shares, predicted)
        assert shares == pytest.approx([predicted] * 2, abs=0.15), (schedule, micro_batches)
