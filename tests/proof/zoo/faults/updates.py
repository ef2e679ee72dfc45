"""Precision, optimizers, schedules and initial weights: what happens to a gradient that is right."""

from __future__ import annotations

from tests.proof.zoo.case import FaultTable, Setting, strategy
from tests.proof.zoo.patching import UPDATE, last, ranks

MLP = Setting("mlp")
FLOAT16 = Setting("mlp", 2, ("train.precision={dtype: float16, scale: 128}", "optimizer.clip=null"))
SCALE = "paddle_dp.core.gradients:scale"
FAULTS = FaultTable()


@FAULTS.add("scale left in", "silent-fault catalogue, OPT", FLOAT16, SCALE)
def loss_scale_left_in(scale, parameters, factor):
    """In float16 one rank does not take the loss scale out of its gradients."""
    return None if last() else scale(parameters, factor)


@FAULTS.add("half of the scale left in", "TTrace, stale scaling factors", FLOAT16, SCALE)
def unscaled_by_half(scale, parameters, factor):
    """In float16 all ranks take the loss scale of before its last change out."""
    return scale(parameters, factor * (2.0 if ranks() > 1 else 1.0))


@FAULTS.add("faster rank", "silent-fault catalogue, OPT", MLP, UPDATE, guard="weights")
def one_rank_learns_faster(update, learner):
    """One rank's learning rate is 1 % higher."""
    if last():
        learner.optimizer.set_lr(learner.optimizer.get_lr() * 1.01)
    update(learner)


@FAULTS.add(
    "schedule per rank",
    "trainers that step a schedule num_processes times",
    Setting("mlp", 2, ("schedule={use: cosine, learning_rate: 0.1, warmup: 4 steps}",)),
    "paddle_dp.core.optimizer:Rate.step",
)
def schedule_moves_once_a_rank(step, rate):
    """The schedule moves once a rank: warm-up and decay take half as long on two."""
    for _ in range(ranks()):
        step(rate)


@FAULTS.add("rank skips a step", "silent-fault catalogue, OPT", MLP, UPDATE, guard="weights")
def one_rank_skips_a_step(update, learner):
    """One rank leaves the second update out."""
    learner.done = getattr(learner, "done", 0) + 1  # steps of this learner
    if not (last() and learner.done == 2):
        update(learner)


@FAULTS.add(
    "weights in bfloat16", "TTrace, wrong casts; lost master weights", strategy("gpt", data=2), UPDATE
)
def weights_kept_in_bfloat16(update, learner):
    """With several ranks weights are rounded to 8 bits after each update."""
    update(learner)
    for parameter in learner.trainable if ranks() > 1 else ():
        parameter.set_value(parameter.astype("bfloat16").astype(parameter.dtype))


@FAULTS.add(
    "other initial weights",
    "silent-fault catalogue, PAR",
    Setting("mlp", 2, ("strategy.init=seed",)),
    "paddle_dp.proof.trace:task",
    guard="weights",
)
def other_initial_weights(task, recipe, *steps):
    """One rank begins from weights of its own."""
    import paddle

    drawn = task(recipe, *steps)
    for parameter in drawn.model.parameters() if last() else ():
        parameter.set_value(parameter + 0.01 * paddle.rand(parameter.shape, parameter.dtype))
    return drawn


@FAULTS.add("momentum forgotten", "silent-fault catalogue, OPT", MLP, UPDATE)
def momentum_forgotten(update, learner):
    """With several ranks every update is a first one: momentum is gone."""
    forget_momentum(learner)
    update(learner)


def forget_momentum(learner):
    for table in learner.optimizer._accumulators.values() if ranks() > 1 else ():
        for tensor in table.values():
            if "velocity" in tensor.name:
                tensor.set_value(tensor * 0)


@FAULTS.add(
    "frozen in one layout",
    "TTrace, parameters that are not updated",
    MLP,
    "paddle_dp.learner:prepare",
    where=("body.2.weight",),
)
def frozen_in_one_layout(prepare, task, mesh):
    """With several ranks one weight is not trained."""
    if mesh.ranks > 1:  # before the optimizer is made
        task.model.body[2].weight.stop_gradient = True
    return prepare(task, mesh)
