"""Owners of updates: gradients that do not reach them, weights that do not come back, states of somebody else."""

from __future__ import annotations

from tests.proof.zoo.case import FaultTable, strategy
from tests.proof.zoo.patching import AXES, CLIP, UPDATE, last

SHARDING2, STAGE3 = strategy("gpt", sharding=2), strategy("gpt", sharding=2, sharding_stage=3)
BEGIN = "paddle_dp.axes.sharding.pulled_params:Pull._begin"
FAULTS = FaultTable()


@FAULTS.add(
    "owner alone",
    "TTrace, missing gradient reduction",
    SHARDING2,
    "paddle_dp.exchange.pushed_gradients:PushReduce._add_up",
)
def owner_keeps_its_own(add_up, reduce, number):
    """Owners update from their own share of the batch."""
    local = reduce._terms[number][reduce._me]
    reduce._terms[number] = {reduce._me: local * len(reduce._push.ranks)}
    add_up(reduce, number)


@FAULTS.add(
    "updates not shared",
    "TTrace, parameters that are not updated under ZeRO",
    SHARDING2,
    "paddle_dp.axes.sharding.zero:Zero.share",
    guard="weights",
)
def updates_stay_with_their_owners(share, zero):
    """New weights stay with their owners."""


@FAULTS.add("mean at the owner", "silent-fault catalogue, PAR", SHARDING2, f"{AXES}.finish")
def averaged_where_summed(finish, exchange):
    """Gradients are averaged at the owner where the count had divided them already."""
    finish(exchange)
    for parameter in exchange.placed.trainable if exchange.zero is not None else ():
        if parameter.grad is not None:
            parameter.grad.set_value(parameter.grad / exchange.zero.group.nranks)


@FAULTS.add("owners decay twice", "silent-fault catalogue, OPT", SHARDING2, UPDATE)
def owners_decay_twice(update, learner):
    """Owners apply weight decay before the optimizer does it again."""
    from paddle_dp.axes.axes_exchange import OwnerWeights

    if isinstance(learner.weights, OwnerWeights):
        for parameter in learner.weights.zero.parameters:
            if learner.placed.is_updated(parameter) and parameter.ndim > 1:
                parameter.set_value(parameter * (1 - learner.optimizer.get_lr() * 0.1))
    update(learner)


@FAULTS.add("stale loan", "TTrace, stale parameters", STAGE3, "paddle_dp.axes.sharding.stage3:Stage3._fill")
def stale_loan(fill, stage3, index):
    """With sharded parameters a rank goes on computing with those that it was lent first."""
    fill(stage3, index)
    lent, parameter = stage3.__dict__.setdefault("first_loans", {}), stage3._parameters[index]
    if index in lent:
        lent[index].clone()._share_buffer_to(parameter)
    else:
        lent[index] = parameter.detach().clone()


@FAULTS.add("loan before the update", "our own, found by mutation", STAGE3, BEGIN)
def loan_before_the_update(begin, pull):
    """With sharded parameters an owner lends them before it has updated them."""
    pull._begun = True  # it says so to nobody, and no question for its parameters waits for that


@FAULTS.add(
    "loan before the update, rehearsed",
    "our own, found by mutation",
    STAGE3,
    BEGIN,
    guard="rehearsal",
    exam="rehearsal",
)
def loan_before_the_update_rehearsed(begin, pull):
    """The same in the training itself."""
    loan_before_the_update(begin, pull)


@FAULTS.add("owner's norm", "Megatron-LM #5916, #7530", SHARDING2, CLIP)
def norm_of_the_own_part(clip, norm):
    """Each owner clips by the norm of its own gradients."""
    from paddle_dp.core import gradients

    if norm.placed.mesh.axes.sharding == 1:
        clip(norm)
        return
    for each in norm.clips:
        local = float(gradients.global_norm(each.parameters))
        gradients.scale(each.parameters, each.bound / max(local, each.bound))


@FAULTS.add("owner skips a step", "TTrace, parameters that are not updated under ZeRO", SHARDING2, UPDATE)
def one_owner_skips_a_step(update, learner):
    """One owner leaves the second update out and hands its old weights on as new ones."""
    learner.done = getattr(learner, "done", 0) + 1  # steps of this learner
    if last() and learner.done == 2:
        for parameter in learner.trainable:
            parameter.clear_gradient(False)
    update(learner)
