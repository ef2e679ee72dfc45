"""Data parallelism: gradients that are not exchanged, exchanged wrongly, or divided by the wrong number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tests.proof.zoo.case import Fault, Setting, strategy
from tests.proof.zoo.patching import (
    COUNT,
    FACTOR,
    NORMS,
    PUSHED,
    UPDATE,
    all_of,
    before_the_exchange,
    last,
    rank,
    ranks,
    replaced,
)


def scaled_by(factor: Callable[[Any, Any, Any], float]) -> Callable[[], AbstractContextManager[None]]:
    """Each micro-batch's loss is weighed by `factor(runner, micro-batch, count)` too much."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def weighed(self: Any, micro_batch: Any, count: Any, exchange: Any) -> Any:
            found = original(self, micro_batch, count, exchange)
            return found * factor(self, micro_batch, count) if ranks() > 1 and micro_batch.samples else found

        return weighed

    return lambda: replaced(FACTOR, make)


def local_mean(runner: Any, micro_batch: Any, count: Any) -> float:
    """From «sum over the global count» to «mean of the own share, averaged over ranks and micro-batches»."""
    # The recipe, recipes/mlp.yaml, has 2 micro-batches.
    return float(count) / (micro_batch.samples * runner.placed.mesh.dp_size * 2)


def left_out() -> AbstractContextManager[None]:
    """The last parameter, head.bias, is not among those that are exchanged."""

    def make(init: Callable[..., Any]) -> Callable[..., Any]:
        def leaving_out(self: Any, among: Any, me: int, parameters: Any, keepers: Any, **more: Any) -> None:
            init(self, among, me, parameters[:-1], keepers[:-1], **more)

        return leaving_out

    return replaced(f"{PUSHED}.__init__", make)


def exchange_after_the_first_micro_batch() -> AbstractContextManager[None]:
    from paddle_dp.exchange.pushed_gradients import PushedGradients

    finish = PushedGradients.finish

    def make(backward: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def early(self: Any, last: bool, counted: Any = 0) -> Iterator[None]:
            with backward(self, not last):
                yield
            if not last:
                finish(self)

        return early

    nothing_later = replaced(f"{PUSHED}.finish", lambda _: lambda self: [])
    return all_of(nothing_later, replaced(f"{PUSHED}.backward", make))


def no_exchange() -> AbstractContextManager[None]:
    """Every rank trains alone; all curves look right."""
    nothing_overlapped = replaced(f"{PUSHED}.backward", lambda _: lambda self, last, counted=0: nullcontext())
    return all_of(nothing_overlapped, replaced(f"{PUSHED}.finish", lambda _: lambda self: []))


def no_exchange_and_equal_shares() -> AbstractContextManager[None]:
    """Rank 0's weights are sent to all after each update: the ranks are equal, and half of the batch is lost."""

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def overwritten(self: Any) -> None:
            step(self)
            if ranks() > 1:
                import paddle.distributed as dist

                for parameter in self.trainable:
                    dist.broadcast(parameter, 0)

        return overwritten

    return all_of(no_exchange(), replaced(UPDATE, make))


def clipped_before_the_exchange() -> AbstractContextManager[None]:
    def make(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def clipping(self: Any) -> None:
            from paddle_dp.core import gradients

            norm = float(gradients.global_norm(self.placed.trainable))
            gradients.scale(self.placed.trainable, min(1.0, 0.05 / norm))
            exchange(self)

        return clipping

    return before_the_exchange(make)


def norm_of_every_copy() -> AbstractContextManager[None]:
    """The clip's norm counts each rank's copy of the gradients."""

    def make(norm: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, lists: norm(self, lists) * self.placed.mesh.axes.data**0.5

    return replaced(NORMS, make)


def exchanged_in_bfloat16() -> AbstractContextManager[None]:
    def make(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def rounding(self: Any) -> None:
            for parameter in self.placed.trainable:
                kind = parameter.grad.dtype
                parameter.grad.set_value(parameter.grad.astype("bfloat16").astype(kind))
            exchange(self)

        return rounding

    return before_the_exchange(make)


def one_in_a_thousand() -> AbstractContextManager[None]:
    """One parameter's gradient is 0.1 % too large on the last rank, before the exchange."""

    def make(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def scaling(self: Any) -> None:
            if last():
                from paddle_dp.core import gradients

                gradients.scale([self.placed.model.blocks[1].norm1.weight], 1.001)
            exchange(self)

        return scaling

    return before_the_exchange(make)


def not_cleared() -> AbstractContextManager[None]:
    """The last rank does not clear its gradients: they keep adding up."""

    def make(clear: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *given, **named: None if last() else clear(self, *given, **named)

    return replaced("paddle.optimizer:Optimizer.clear_grad", make)


def wrong_divisor_of_a_short_batch() -> AbstractContextManager[None]:
    def make(factor: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, micro_batch, divisor, exchange: factor(
            self, micro_batch, 50 if ranks() > 1 else divisor, exchange
        )

    return replaced(FACTOR, make)


def shares_swap_weight() -> AbstractContextManager[None]:
    """A data axis of 2: the first rank's gradient counts 1.5, the second's 0.5."""

    def make(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def weighing(self: Any) -> None:
            from paddle_dp.core import gradients

            if ranks() > 1:
                gradients.scale(self.placed.trainable, 1.5 if rank() == 0 else 0.5)
            exchange(self)

        return weighing

    return before_the_exchange(make)


def local_counts() -> AbstractContextManager[None]:
    """Each rank divides by its own count of targets, times the ranks, where some targets do not count."""

    def make(agreed: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, counted: (
            float(counted) * self.mesh.dp_size if ranks() > 1 else agreed(self, counted)
        )

    return replaced(COUNT, make)


def unused_on_one_rank() -> AbstractContextManager[None]:
    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        def skipping(self: Any, samples: Any) -> Any:
            if not last():
                return forward(self, samples)
            first, activation = self.body[0], self.body[1]
            return self.head(activation(first(samples)))

        return skipping

    return replaced("models.mlp:MLP.forward", make)


MLP, DATA2 = Setting("mlp"), strategy("gpt", data=2)
FAULTS = (
    Fault(
        name="sum for mean",
        says="Gradients are summed over the ranks where they should be averaged.",
        source="TTrace, wrong loss scaling under data parallelism",
        setting=MLP,
        patch=scaled_by(lambda runner, micro_batch, count: float(runner.placed.mesh.ranks)),
    ),
    Fault(
        name="averaged twice",
        says="The loss is divided by the number of ranks, and the exchange averages once more.",
        source="TTrace, wrong loss scaling under context parallelism",
        setting=MLP,
        patch=scaled_by(lambda runner, micro_batch, count: 1 / runner.placed.mesh.ranks),
    ),
    Fault(
        name="mean of means",
        says="Each rank divides by its own count, and unequal shares are averaged alike.",
        source="Megatron-LM #7452, per-token loss with local counts",
        setting=MLP,
        patch=scaled_by(local_mean),
    ),
    Fault(
        name="local counts",
        says="Where padding does not count, each rank divides by its own number of targets.",
        source="Megatron-LM #7452 (3), per-token loss with local counts",
        setting=DATA2.with_("loss={use: cross_entropy, ignore_index: 0}"),
        patch=local_counts,
    ),
    Fault(
        name="left out of the bucket",
        says="One bias is not exchanged.",
        source="DeepSpeed #8382: all-reduce skipped for one bucket",
        setting=MLP,
        patch=left_out,
        guard="weights",
        where=("head.bias", "data axis"),
    ),
    Fault(
        name="exchange too early",
        says="With two micro-batches a batch, gradients meet after the first, and the last one's stay at home.",
        source="DeepSpeed #8224: reduction before all uses are done",
        setting=MLP,
        patch=exchange_after_the_first_micro_batch,
        guard="weights",
    ),
    Fault(
        name="ranks train alone",
        says="No gradient is exchanged, and every rank's curve looks right.",
        source="verl #7493, trl #7245",
        setting=MLP,
        patch=no_exchange,
        guard="weights",
    ),
    Fault(
        name="first rank wins",
        says="No gradient is exchanged; all ranks take over rank 0's weights after each update, so they are equal.",
        source="verl #7493, trl #7245, hidden from digests",
        setting=MLP,
        patch=no_exchange_and_equal_shares,
    ),
    Fault(
        name="clipped too early",
        says="Each rank clips its own gradient before the exchange.",
        source="silent-fault catalogue, OPT",
        setting=DATA2,
        patch=clipped_before_the_exchange,
    ),
    Fault(
        name="norm of copies",
        says="The clip's global norm counts the copies of all data ranks.",
        source="Megatron-LM #5916",
        setting=DATA2,
        patch=norm_of_every_copy,
    ),
    Fault(
        name="exchange in bfloat16",
        says="Gradients are rounded to 8 bits before they are added up.",
        source="silent-fault catalogue, PAR",
        setting=DATA2,
        patch=exchanged_in_bfloat16,
    ),
    Fault(
        name="one in a thousand",
        says="One norm's gradient is 0.1 % too large on one rank.",
        source="our own measure of what a proof can see",
        setting=DATA2,
        patch=one_in_a_thousand,
        where=("blocks.1.norm1.weight",),
    ),
    Fault(
        name="never cleared",
        says="One rank does not clear its gradients: they keep adding up.",
        source="fleet, sharding v2 with clear_grad()",
        setting=DATA2,
        patch=not_cleared,
    ),
    Fault(
        name="divided by train.batch",
        says="A short batch is divided by the size of a full one.",
        source="silent-fault catalogue, DATA",
        setting=MLP,
        patch=wrong_divisor_of_a_short_batch,
    ),
    Fault(
        name="unequal votes",
        says="One rank's gradient counts three times the other's; their weights add up to what they should.",
        source="silent-fault catalogue, PAR",
        setting=DATA2,
        patch=shares_swap_weight,
    ),
    Fault(
        name="unused on one rank",
        says="One rank's forward leaves two layers out, so their bucket is never exchanged.",
        source="paddle.DataParallel without find_unused_parameters",
        setting=MLP,
        patch=unused_on_one_rank,
        guard="gradients",
    ),
)
