"""Data parallelism: gradients that are not exchanged, exchanged wrongly, or divided by the wrong number."""

from __future__ import annotations

from contextlib import contextmanager

from tests.proof.zoo.case import FaultTable, Setting, strategy
from tests.proof.zoo.patching import (
    AXES,
    COUNT,
    FACTOR,
    NORMS,
    NOTHING_OVERLAPPED,
    NOTHING_PUSHED,
    PUSHED,
    UPDATE,
    around,
    last,
    rank,
    ranks,
)

MLP, DATA2 = Setting("mlp"), strategy("gpt", data=2)
BEFORE_THE_EXCHANGE = {
    "place": f"{AXES}.finish",
    "also": (NOTHING_OVERLAPPED,),
}  # all gradients are whole there
FAULTS = FaultTable()


@FAULTS.add("sum for mean", "TTrace, wrong loss scaling under data parallelism", MLP, FACTOR)
def sum_for_mean(factor, runner, *micro_batch):
    """Gradients are summed over the ranks where they should be averaged."""
    return factor(runner, *micro_batch) * float(runner.placed.mesh.ranks)


@FAULTS.add("averaged twice", "TTrace, wrong loss scaling under context parallelism", MLP, FACTOR)
def averaged_twice(factor, runner, *micro_batch):
    """The loss is divided by the number of ranks, and the exchange averages once more."""
    return factor(runner, *micro_batch) * (1 / runner.placed.mesh.ranks)


@FAULTS.add("mean of means", "Megatron-LM #7452, per-token loss with local counts", MLP, FACTOR)
def mean_of_means(factor, runner, micro_batch, count, exchange):
    """Each rank divides by its own count, and unequal shares are averaged alike."""
    scale = factor(runner, micro_batch, count, exchange)
    if ranks() == 1 or not micro_batch.samples:
        return scale
    # The recipe, recipes/mlp.yaml, has 2 micro-batches.
    return scale * (float(count) / (micro_batch.samples * runner.placed.mesh.dp_size * 2))


@FAULTS.add(
    "local counts",
    "Megatron-LM #7452 (3), per-token loss with local counts",
    DATA2.with_("loss={use: cross_entropy, ignore_index: 0}"),
    COUNT,
)
def local_counts(total, counter, counted):
    """Where padding does not count, each rank divides by its own number of targets."""
    return float(counted) * counter.mesh.dp_size if ranks() > 1 else total(counter, counted)


@FAULTS.add(
    "left out of the bucket",
    "DeepSpeed #8382: all-reduce skipped for one bucket",
    MLP,
    f"{PUSHED}.__init__",
    guard="weights",
    where=("head.bias", "data axis"),
)
def left_out(init, exchange, among, me, parameters, keepers, **more):
    """One bias is not exchanged."""
    init(exchange, among, me, parameters[:-1], keepers[:-1], **more)  # the last one is head.bias


@FAULTS.add(
    "exchange too early",
    "DeepSpeed #8224: reduction before all uses are done",
    MLP,
    f"{PUSHED}.backward",
    also=(
        (f"{PUSHED}.finish", around(lambda finish, exchange: finish(exchange) if exchange.is_early else [])),
    ),
    guard="weights",
)
@contextmanager
def exchange_after_the_first_micro_batch(backward, exchange, last, counted=0):
    """With two micro-batches a batch, gradients meet after the first, and the last one's stay at home."""
    exchange.is_early = not last
    with backward(exchange, not last):
        yield
    if exchange.is_early:
        exchange.finish()
        exchange.is_early = False


@FAULTS.add(
    "ranks train alone",
    "verl #7493, trl #7245",
    MLP,
    f"{PUSHED}.finish",
    also=(NOTHING_PUSHED,),
    guard="weights",
)
def no_exchange(finish, exchange):
    """No gradient is exchanged, and every rank's curve looks right."""
    return []


@FAULTS.add(
    "first rank wins",
    "verl #7493, trl #7245, hidden from digests",
    MLP,
    UPDATE,
    also=(NOTHING_PUSHED, (f"{PUSHED}.finish", around(no_exchange))),
)
def no_exchange_and_equal_weights(update, learner):
    """No gradient is exchanged; all ranks take over rank 0's weights after each update, so they are equal."""
    import paddle.distributed as dist

    update(learner)
    for parameter in learner.trainable if ranks() > 1 else ():
        dist.broadcast(parameter, 0)


@FAULTS.add("clipped too early", "silent-fault catalogue, OPT", DATA2, **BEFORE_THE_EXCHANGE)
def clipped_before_the_exchange(finish, exchange):
    """Each rank clips its own gradient before the exchange."""
    from paddle_dp.core import gradients

    norm = float(gradients.global_norm(exchange.placed.trainable))
    gradients.scale(exchange.placed.trainable, min(1.0, 0.05 / norm))
    finish(exchange)


@FAULTS.add("norm of copies", "Megatron-LM #5916", DATA2, NORMS)
def norm_of_every_copy(norms, norm, lists):
    """The clip's global norm counts the copies of all data ranks."""
    return norms(norm, lists) * norm.placed.mesh.axes.data**0.5


@FAULTS.add("exchange in bfloat16", "silent-fault catalogue, PAR", DATA2, **BEFORE_THE_EXCHANGE)
def exchanged_in_bfloat16(finish, exchange):
    """Gradients are rounded to 8 bits before they are added up."""
    for parameter in exchange.placed.trainable:
        kind = parameter.grad.dtype
        parameter.grad.set_value(parameter.grad.astype("bfloat16").astype(kind))
    finish(exchange)


@FAULTS.add(
    "one in a thousand",
    "our own measure of what a proof can see",
    DATA2,
    **BEFORE_THE_EXCHANGE,
    where=("blocks.1.norm1.weight",),
)
def one_in_a_thousand(finish, exchange):
    """One norm's gradient is 0.1 % too large on one rank."""
    from paddle_dp.core import gradients

    if last():
        gradients.scale([exchange.placed.model.blocks[1].norm1.weight], 1.001)
    finish(exchange)


@FAULTS.add(
    "never cleared", "fleet, sharding v2 with clear_grad()", DATA2, "paddle.optimizer:Optimizer.clear_grad"
)
def not_cleared(clear, optimizer, *options, **named):
    """One rank does not clear its gradients: they keep adding up."""
    if not last():
        clear(optimizer, *options, **named)


@FAULTS.add("divided by train.batch", "silent-fault catalogue, DATA", MLP, FACTOR)
def wrong_divisor_of_a_short_batch(factor, runner, micro_batch, divisor, exchange):
    """A short batch is divided by the size of a full one."""
    return factor(runner, micro_batch, 50 if ranks() > 1 else divisor, exchange)


@FAULTS.add("unequal votes", "silent-fault catalogue, PAR", DATA2, **BEFORE_THE_EXCHANGE)
def shares_swap_weight(finish, exchange):
    """One rank's gradient counts three times the other's; their weights add up to what they should."""
    from paddle_dp.core import gradients

    if ranks() > 1:
        gradients.scale(exchange.placed.trainable, 1.5 if rank() == 0 else 0.5)
    finish(exchange)


@FAULTS.add(
    "unused on one rank",
    "paddle.DataParallel without find_unused_parameters",
    MLP,
    "models.mlp:MLP.forward",
    guard="gradients",
)
def unused_on_one_rank(forward, model, samples):
    """One rank's forward leaves two layers out, so their bucket is never exchanged."""
    if not last():
        return forward(model, samples)
    first, activation = model.body[0], model.body[1]
    return model.head(activation(first(samples)))
