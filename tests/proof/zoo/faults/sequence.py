"""Split sequences: stretches of the tokens on each rank (sequence parallelism), and along an axis of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from tests.proof.zoo.case import Fault, strategy
from tests.proof.zoo.patching import replaced

SEQUENCE = "paddle_dp.axes.sequence.ulysses"


def unmarked() -> AbstractContextManager[None]:
    return replaced(
        "paddle_dp.axes.sequence.megatron_sp:mark_as_sequence_parallel_parameter",
        lambda mark: lambda p: None,
    )


def marked_sums_twice() -> AbstractContextManager[None]:
    def make(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def twice(parameters: Any, group: Any, scale: Any = None) -> None:
            exchange(parameters, group, scale=scale)
            for parameter in parameters:
                parameter.grad.set_value(parameter.grad * 2)

        return twice

    return replaced("paddle_dp.axes.axes_exchange:fused_allreduce_gradients_with_group", make)


def not_divided() -> AbstractContextManager[None]:
    """Each rank's mean over its stretch is added up as if it were a part of the mean."""

    def make(added: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, value: added(self, value) * self.group.nranks

    return replaced(f"{SEQUENCE}:SequenceShardLoss._added", make)


def attention_at_home() -> AbstractContextManager[None]:
    """No trade of tokens for heads: every rank attends to its own stretch."""
    return replaced(f"{SEQUENCE}:_with_all_to_all", lambda original: lambda attend, group: attend)


def targets_of_the_other_stretch() -> AbstractContextManager[None]:
    def make(call: Callable[..., Any]) -> Callable[..., Any]:
        def shifted(self: Any, outputs: Any, targets: Any) -> Any:
            import paddle

            return call(self, outputs, paddle.roll(targets, targets.shape[1] // self.group.nranks, axis=1))

        return shifted

    return replaced(f"{SEQUENCE}:SequenceShardLoss.__call__", make)


def no_gradient_through_the_trade() -> AbstractContextManager[None]:
    def make(pair: Any) -> Any:
        def backward(ctx: Any, gradient: Any) -> Any:
            return pair.backward(ctx, gradient) * 0.0

        return type("Without", (pair,), {"backward": staticmethod(backward)})

    return replaced(f"{SEQUENCE}:WithAdjoint", make)


def trade_keeps_its_order() -> AbstractContextManager[None]:
    """What comes back from the trade is put together in the wrong order of ranks."""

    def make(traded: Callable[..., Any]) -> Callable[..., Any]:
        return lambda parts, group: traded(parts, group).flip(0)

    return replaced(f"{SEQUENCE}:_all_to_all", make)


@contextmanager
def partial_sending() -> Iterator[None]:
    """Fleet's default: activations that sequence parallelism has cut already are cut once more on their way."""
    from paddle_dp.gloo import fleet_mends

    with patch.dict(fleet_mends.PIPELINE_SETTINGS, {"enable_partial_send_recv": True}):
        yield


SEQUENCE_SHARDS, SEQUENCE2 = strategy("gpt", tensor=2, sequence_parallel=True), strategy("gpt", sequence=2)
FAULTS = (
    Fault(
        name="unmarked norms",
        says="On stretches of the sequence, gradients of norms and biases are not added up over the ranks.",
        source="fleet; TTrace; Megatron-LM #1446; PaddleFleet #1162",
        setting=SEQUENCE_SHARDS,
        patch=unmarked,
        guard="weights",
        where=("norm.bias", "tensor axis", "a sum over the axis is missing"),
    ),
    Fault(
        name="norms twice",
        says="On stretches of the sequence, gradients of norms and biases are added up twice.",
        source="silent-fault catalogue, PAR",
        setting=SEQUENCE_SHARDS,
        patch=marked_sums_twice,
        where=("norm",),
    ),
    Fault(
        name="not divided by the axis",
        says="Along the sequence axis means are added up and not averaged.",
        source="fleet's sep axis; TTrace, wrong loss scaling under context parallelism",
        setting=SEQUENCE2,
        patch=not_divided,
    ),
    Fault(
        name="attention at home",
        says="Every rank of the sequence axis attends to its own stretch only.",
        source="TTrace, wrong attention under context parallelism",
        setting=SEQUENCE2,
        patch=attention_at_home,
    ),
    Fault(
        name="wrong stretch of targets",
        says="Outputs of one stretch are compared with the targets of another.",
        source="silent-fault catalogue, PAR",
        setting=SEQUENCE2,
        patch=targets_of_the_other_stretch,
    ),
    Fault(
        name="no gradient through the trade",
        says="The gradient of an all-to-all is zero: queries, keys and values stop learning.",
        source="DeepSpeed #8491",
        setting=SEQUENCE2,
        patch=no_gradient_through_the_trade,
        where=("qkv",),
    ),
    Fault(
        name="trade in the wrong order",
        says="What comes back from the all-to-all is put together in the wrong order.",
        source="silent-fault catalogue, PAR",
        setting=SEQUENCE2,
        patch=trade_keeps_its_order,
    ),
    Fault(
        name="partial sending",
        says="Between stages, activations that are cut already are cut once more.",
        source="fleet, enable_partial_send_recv with sequence parallelism",
        setting=strategy("gpt", 4, tensor=2, pipeline=2, sequence_parallel=True),
        patch=partial_sending,
    ),
)
