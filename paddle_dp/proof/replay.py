"""Repeats the updates of N ranks on one process, from the ranks' gradients.

The noise of an update does not follow from that of its gradient: Adam's first step is the learning rate times the sign
of the gradient, so an element within the noise of 0 is off by all of it, while SGD's is not off at all. But from equal
gradients every optimizer computes the same update on both sides, to the last places of its arithmetic. So gradients are
judged by themselves, and updates and optimizer states against what one process computes from the ranks' gradients,
whatever the optimizer, its clip, groups, decay and schedule.
"""

from __future__ import annotations

import paddle

from paddle_dp.checkpoint import TensorShard
from paddle_dp.parallel import Learner
from paddle_dp.proof.record import Put, Recorder
from paddle_dp.proof.trace_files import REPLAYED, Key, Trace, key


def replay(learner: Learner, many: Trace, put: Put) -> None:
    """Passes to `put`, by key, what `learner`, on one process and in its initial state, computes from the gradients of
    the trace `many`: its updates, and the optimizer states after the last one.

    There is no forward and no backward. A step whose update the ranks skipped or did not record only moves the
    schedule.
    """

    def taken(number: str, shard: TensorShard) -> None:
        if Key.read(number).kind in REPLAYED:
            put(number, shard)

    recorder = Recorder(learner, taken)
    updates = set(many.facts["recorded"])
    states = {found.step for found in map(Key.read, many.keys) if found.kind == "state"}
    for step in range(1, max(updates, default=0) + 1):
        if step in updates:
            recorder.watch(step)
            give(learner, step, many)
            learner._step()
            learner.optimizer.clear_grad(set_to_zero=False)
        learner.rate.step()
    for step in states:  # one: the last
        recorder.states(step)


def give(learner: Learner, step: int, many: Trace) -> None:
    """Puts a step's gradients of the whole model into the parameters that have one on the ranks."""
    for name, parameter in learner.named_parameters(trainable=True):
        number = key("gradient", step, name)
        if number not in many.keys:
            continue
        array = many.array(number)
        if list(array.shape) == list(parameter.shape):  # one of another shape is a difference by itself
            parameter.grad = paddle.to_tensor(array, dtype=parameter.dtype)
