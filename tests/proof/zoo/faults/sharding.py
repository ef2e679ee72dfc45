"""Owners of updates: gradients that do not reach them, weights that do not come back, states of somebody else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.proof.zoo.case import Fault, strategy
from tests.proof.zoo.patching import AXES, CLIP, UPDATE, last, replaced

ZERO = "paddle_dp.axes.sharding.zero:Zero"


def owner_keeps_its_own() -> AbstractContextManager[None]:
    """The sum at the owner is left out, and its own share taken for all of it."""

    def make(add_up: Callable[..., Any]) -> Callable[..., Any]:
        def alone(self: Any, number: int) -> None:
            own = self._terms[number][self._me]
            self._terms[number] = {self._me: own * len(self._push.ranks)}
            add_up(self, number)

        return alone

    return replaced("paddle_dp.exchange.pushed_gradients:PushReduce._add_up", make)


def updates_stay_with_their_owners() -> AbstractContextManager[None]:
    return replaced(f"{ZERO}.share", lambda share: lambda self: None)


def averaged_where_summed() -> AbstractContextManager[None]:
    def make(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def halved(self: Any) -> None:
            exchange(self)
            for parameter in self.placed.trainable:
                if self.zero is not None and parameter.grad is not None:
                    parameter.grad.set_value(parameter.grad / self.zero.group.nranks)

        return halved

    return replaced(f"{AXES}.finish", make)


def owners_decay_twice() -> AbstractContextManager[None]:
    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def decaying(self: Any) -> None:
            from paddle_dp.axes.axes_exchange import OwnerWeights

            if isinstance(self.weights, OwnerWeights):
                for parameter in self.weights.zero.parameters:
                    if self.placed.is_updated(parameter) and parameter.ndim > 1:
                        parameter.set_value(parameter * (1 - self.optimizer.get_lr() * 0.1))
            step(self)

        return decaying

    return replaced(UPDATE, make)


def stale_loan() -> AbstractContextManager[None]:
    """ZeRO-3: a rank keeps the first values that it gathered, and computes with them for ever."""
    first: dict[tuple[int, str], Any] = {}

    def make(fill: Callable[..., Any]) -> Callable[..., Any]:
        def keeping_the_first(self: Any, place: int) -> None:
            fill(self, place)
            key = place, str(self._parameters[place].dtype)  # a proof has two runs in a process
            if key in first:
                first[key].clone()._share_buffer_to(self._parameters[place])
            else:
                first[key] = self._parameters[place].detach().clone()

        return keeping_the_first

    return replaced("paddle_dp.axes.sharding.stage3:Stage3._fill", make)


def loan_before_the_update() -> AbstractContextManager[None]:
    """ZeRO-3: an owner never says that it has begun a pass, and no question for its parameters waits for that."""

    def make(begin: Callable[..., Any]) -> Callable[..., Any]:
        def begun(self: Any) -> None:
            self._begun = True

        return begun

    return replaced("paddle_dp.axes.sharding.pulled_params:Pull._begin", make)


def norm_of_the_own_part() -> AbstractContextManager[None]:
    """Each owner clips by the norm of its own gradients."""

    def make(clip: Callable[..., Any]) -> Callable[..., Any]:
        def alone(self: Any) -> None:
            from paddle_dp.core import gradients

            if self.placed.mesh.axes.sharding == 1:
                clip(self)
                return
            for each in self.clips:
                norm = float(gradients.global_norm(each.parameters))
                gradients.scale(each.parameters, each.bound / max(norm, each.bound))

        return alone

    return replaced(CLIP, make)


def one_owner_skips_a_step() -> AbstractContextManager[None]:
    """The last owner leaves one update out, and shares its old weights as new ones: all ranks stay equal."""

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def skipping(self: Any) -> None:
            self.done = getattr(self, "done", 0) + 1  # steps of this learner
            if last() and self.done == 2:
                for parameter in self.trainable:
                    parameter.clear_gradient(False)
            step(self)

        return skipping

    return replaced(UPDATE, make)


SHARDING2 = strategy("gpt", sharding=2)
FAULTS = (
    Fault(
        name="owner alone",
        says="Owners update from their own share of the batch.",
        source="TTrace, missing gradient reduction",
        setting=SHARDING2,
        patch=owner_keeps_its_own,
    ),
    Fault(
        name="updates not shared",
        says="New weights stay with their owners.",
        source="TTrace, parameters that are not updated under ZeRO",
        setting=SHARDING2,
        patch=updates_stay_with_their_owners,
        guard="weights",
    ),
    Fault(
        name="mean at the owner",
        says="Gradients are averaged at the owner where the count had divided them already.",
        source="silent-fault catalogue, PAR",
        setting=SHARDING2,
        patch=averaged_where_summed,
    ),
    Fault(
        name="owners decay twice",
        says="Owners apply weight decay before the optimizer does it again.",
        source="silent-fault catalogue, OPT",
        setting=SHARDING2,
        patch=owners_decay_twice,
    ),
    Fault(
        name="stale loan",
        says="With sharded parameters a rank goes on computing with those that it was lent first.",
        source="TTrace, stale parameters",
        setting=strategy("gpt", sharding=2, sharding_stage=3),
        patch=stale_loan,
    ),
    Fault(
        name="loan before the update",
        says="With sharded parameters an owner lends them before it has updated them.",
        source="our own, found by mutation",
        setting=strategy("gpt", sharding=2, sharding_stage=3),
        patch=loan_before_the_update,
    ),
    Fault(
        name="loan before the update, rehearsed",
        says="The same in the training itself.",
        source="our own, found by mutation",
        setting=strategy("gpt", sharding=2, sharding_stage=3),
        patch=loan_before_the_update,
        guard="rehearsal",
        exam="rehearsal",
    ),
    Fault(
        name="owner's norm",
        says="Each owner clips by the norm of its own gradients.",
        source="Megatron-LM #5916, #7530",
        setting=SHARDING2,
        patch=norm_of_the_own_part,
    ),
    Fault(
        name="owner skips a step",
        says="One owner leaves the second update out and hands its old weights on as new ones.",
        source="TTrace, parameters that are not updated under ZeRO",
        setting=SHARDING2,
        patch=one_owner_skips_a_step,
    ),
)
