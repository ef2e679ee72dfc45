"""Updates of N ranks, done again on one process from the gradients that the ranks had.

What an update may differ by cannot be told from what its gradient may: Adam's first step is the rate times the sign of
the gradient, so an element within the noise of 0 is off by all of it, and SGD's is off by nothing. Given the same
gradient, though, every optimizer makes the same update on both sides, to the last places of its own arithmetic. So the
gradients are judged by themselves, and updates and optimizer states against what one process makes of those gradients:
whatever the optimizer is, its clip, its groups, its decay and its schedule included.
"""

from __future__ import annotations

import paddle

from paddle_dp.checkpoint import TensorShard
from paddle_dp.parallel import Learner
from paddle_dp.proof.record import Put, Recorder
from paddle_dp.proof.sheets import REPLAYED, Key, Trace, key


def replay(learner: Learner, many: Trace, put: Put) -> None:
    """Hands to `put` what `learner`, one process at its beginning, makes of the gradients in the trace `many`: its
    updates, and the optimizer's states after the last of them, by key.

    Neither a forward nor a backward is computed. A step whose update the ranks left out, or nobody watched, moves the
    schedule only.
    """

    def taken(number: str, shard: TensorShard) -> None:
        if Key.read(number).kind in REPLAYED:
            put(number, shard)

    recorder = Recorder(learner, taken)
    updates, steps = set(many.facts["recorded"]), len(many.facts["rows"])
    for step in range(1, max(updates, default=0) + 1):
        if step in updates:
            recorder.watch(step)
            _give(learner, step, many)
            learner._step()
            learner.optimizer.clear_grad(set_to_zero=False)
        learner.rate.step()
    if len(updates) == steps:
        recorder.states(steps)


def _give(learner: Learner, step: int, many: Trace) -> None:
    """Puts a step's gradients of the whole model into the parameters; what has none on the ranks keeps none."""
    for name, parameter in learner.named_parameters(trainable=True):
        number = key("gradient", step, name)
        if number not in many.keys:
            continue
        array = many.array(number)
        if list(array.shape) == list(parameter.shape):  # one of another shape is a difference by itself
            parameter.grad = paddle.to_tensor(array, dtype=parameter.dtype)
