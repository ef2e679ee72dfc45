"""Split sequences: stretches of the tokens on each rank (sequence parallelism), and along an axis of their own."""

from __future__ import annotations

from tests.proof.zoo.case import Fault, FaultTable, strategy

SEQUENCE = "paddle_dp.axes.sequence.ulysses"
SEQUENCE_SHARDS, SEQUENCE2 = strategy("gpt", tensor=2, sequence_parallel=True), strategy("gpt", sequence=2)
FAULTS = FaultTable()


@FAULTS.add(
    "unmarked norms",
    "fleet; TTrace; Megatron-LM #1446; PaddleFleet #1162",
    SEQUENCE_SHARDS,
    "paddle_dp.axes.sequence.megatron_sp:mark_as_sequence_parallel_parameter",
    guard="weights",
    where=("norm.bias", "tensor axis", "a sum over the axis is missing"),
)
def unmarked(mark, parameter):
    """On stretches of the sequence, gradients of norms and biases are not added up over the ranks."""


@FAULTS.add(
    "norms twice",
    "silent-fault catalogue, PAR",
    SEQUENCE_SHARDS,
    "paddle_dp.axes.axes_exchange:fused_allreduce_gradients_with_group",
    where=("norm",),
)
def marked_sums_twice(exchange, parameters, *settings, **named):
    """On stretches of the sequence, gradients of norms and biases are added up twice."""
    exchange(parameters, *settings, **named)
    for parameter in parameters:
        parameter.grad.set_value(parameter.grad * 2)


@FAULTS.add(
    "not divided by the axis",
    "fleet's sep axis; TTrace, wrong loss scaling under context parallelism",
    SEQUENCE2,
    f"{SEQUENCE}:SequenceShardLoss._added",
)
def not_divided(added, loss, value):
    """Along the sequence axis means are added up and not averaged."""
    return added(loss, value) * loss.group.nranks


@FAULTS.add(
    "attention at home",
    "TTrace, wrong attention under context parallelism",
    SEQUENCE2,
    f"{SEQUENCE}:_with_all_to_all",
)
def attention_at_home(with_all_to_all, attend, group):
    """Every rank of the sequence axis attends to its own stretch only."""
    return attend  # no trade of tokens for heads


@FAULTS.add(
    "wrong stretch of targets",
    "silent-fault catalogue, PAR",
    SEQUENCE2,
    f"{SEQUENCE}:SequenceShardLoss.__call__",
)
def targets_of_the_other_stretch(loss, owner, outputs, targets):
    """Outputs of one stretch are compared with the targets of another."""
    import paddle

    return loss(owner, outputs, paddle.roll(targets, targets.shape[1] // owner.group.nranks, axis=1))


def no_gradient(pair):
    def backward(ctx, gradient):
        return pair.backward(ctx, gradient) * 0.0

    return type("Without", (pair,), {"backward": staticmethod(backward)})


FAULTS.append(
    Fault(
        name="no gradient through the trade",
        says="The gradient of an all-to-all is zero: queries, keys and values stop learning.",
        source="DeepSpeed #8491",
        setting=SEQUENCE2,
        patches=((f"{SEQUENCE}:WithAdjoint", no_gradient),),
        where=("qkv",),
    )
)


@FAULTS.add("trade in the wrong order", "silent-fault catalogue, PAR", SEQUENCE2, f"{SEQUENCE}:_all_to_all")
def trade_keeps_its_order(all_to_all, chunks, group):
    """What comes back from the all-to-all is put together in the wrong order."""
    return all_to_all(chunks, group).flip(0)


FAULTS.append(
    Fault(
        name="partial sending",
        says="Between stages, activations that are cut already are cut once more.",
        source="fleet, enable_partial_send_recv with sequence parallelism",
        setting=strategy("gpt", 4, tensor=2, pipeline=2, sequence_parallel=True),
        patches=(
            (
                "paddle_dp.gloo.fleet_mends:PIPELINE_SETTINGS",
                lambda settings: {**settings, "enable_partial_send_recv": True},  # fleet's default
            ),
        ),
    )
)
