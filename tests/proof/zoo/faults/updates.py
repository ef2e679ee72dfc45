"""Precision, optimizers, schedules and initial weights: what happens to a gradient that is right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.proof.zoo.case import Fault, Setting, strategy
from tests.proof.zoo.patching import UPDATE, last, ranks, replaced


def loss_scale_left_in() -> AbstractContextManager[None]:
    """On the last rank, gradients are not unscaled before the exchange of a clip's norm and the update."""

    def make(scale: Callable[..., Any]) -> Callable[..., Any]:
        return lambda parameters, factor: None if last() else scale(parameters, factor)

    return replaced("paddle_dp.core.gradients:scale", make)


def unscaled_by_half() -> AbstractContextManager[None]:
    """Every rank takes the scale of before its last change out: half of it is left in, everywhere."""

    def make(scale: Callable[..., Any]) -> Callable[..., Any]:
        return lambda parameters, factor: scale(parameters, factor * (2.0 if ranks() > 1 else 1.0))

    return replaced("paddle_dp.core.gradients:scale", make)


def one_rank_learns_faster() -> AbstractContextManager[None]:
    def make(get: Callable[..., Any]) -> Callable[..., Any]:
        def faster(self: Any) -> None:
            if last():
                self.optimizer.set_lr(self.optimizer.get_lr() * 1.01)
            get(self)

        return faster

    return replaced(UPDATE, make)


def schedule_moves_once_a_rank() -> AbstractContextManager[None]:
    """The schedule is stepped by every rank's count: as in trainers that step it num_processes times."""

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def often(self: Any) -> None:
            for _ in range(ranks()):
                step(self)

        return often

    return replaced("paddle_dp.core.optimizer:Rate.step", make)


def one_rank_skips_a_step() -> AbstractContextManager[None]:
    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def skipping(self: Any) -> None:
            self.done = getattr(self, "done", 0) + 1  # steps of this learner
            if not (last() and self.done == 2):
                step(self)

        return skipping

    return replaced(UPDATE, make)


def weights_kept_in_bfloat16() -> AbstractContextManager[None]:
    """After each update all ranks round their weights to 8 bits: small updates are lost."""

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def rounded(self: Any) -> None:
            step(self)
            if ranks() > 1:
                for parameter in self.trainable:
                    parameter.set_value(parameter.astype("bfloat16").astype(parameter.dtype))

        return rounded

    return replaced(UPDATE, make)


def own_initial_weights() -> AbstractContextManager[None]:
    """Each rank draws its initial weights from a seed of its own."""

    def make(task: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(recipe: Any, *more: Any) -> Any:
            import paddle

            found = task(recipe, *more)
            if last():
                for parameter in found.model.parameters():
                    parameter.set_value(parameter + 0.01 * paddle.rand(parameter.shape, parameter.dtype))
            return found

        return drawn

    return replaced("paddle_dp.proof.trace:task", make)


def momentum_forgotten() -> AbstractContextManager[None]:
    """With several ranks the optimizer is made anew in every step: its states are always those of a first one."""

    def make(step: Callable[..., Any]) -> Callable[..., Any]:
        def forgetting(self: Any) -> None:
            if ranks() > 1:
                for table in self.optimizer._accumulators.values():
                    for tensor in table.values():
                        if "velocity" in tensor.name:
                            tensor.set_value(tensor * 0)
            step(self)

        return forgetting

    return replaced(UPDATE, make)


def frozen_in_one_layout() -> AbstractContextManager[None]:
    """With several ranks one weight is marked as not trainable before the optimizer is made."""

    def make(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def freezing(task: Any, mesh: Any) -> Any:
            if mesh.ranks > 1:
                task.model.body[2].weight.stop_gradient = True
            return prepare(task, mesh)

        return freezing

    return replaced("paddle_dp.learner:prepare", make)


MLP = Setting("mlp")
FLOAT16 = Setting("mlp", 2, ("train.precision={dtype: float16, scale: 128}", "optimizer.clip=null"))
FAULTS = (
    Fault(
        name="scale left in",
        says="In float16 one rank does not take the loss scale out of its gradients.",
        source="silent-fault catalogue, OPT",
        setting=FLOAT16,
        patch=loss_scale_left_in,
        guard="verify",
    ),
    Fault(
        name="half of the scale left in",
        says="In float16 all ranks take the loss scale of before its last change out.",
        source="TTrace, stale scaling factors",
        setting=FLOAT16,
        patch=unscaled_by_half,
    ),
    Fault(
        name="faster rank",
        says="One rank's learning rate is 1 % higher.",
        source="silent-fault catalogue, OPT",
        setting=MLP,
        patch=one_rank_learns_faster,
        guard="weights",
    ),
    Fault(
        name="schedule per rank",
        says="The schedule moves once a rank: warm-up and decay take half as long on two.",
        source="trainers that step a schedule num_processes times",
        setting=Setting("mlp", 2, ("schedule={use: cosine, learning_rate: 0.1, warmup: 4 steps}",)),
        patch=schedule_moves_once_a_rank,
    ),
    Fault(
        name="rank skips a step",
        says="One rank leaves the second update out.",
        source="silent-fault catalogue, OPT",
        setting=MLP,
        patch=one_rank_skips_a_step,
        guard="weights",
    ),
    Fault(
        name="weights in bfloat16",
        says="With several ranks weights are rounded to 8 bits after each update.",
        source="TTrace, wrong casts; lost master weights",
        setting=strategy("gpt", data=2),
        patch=weights_kept_in_bfloat16,
    ),
    Fault(
        name="other initial weights",
        says="One rank begins from weights of its own.",
        source="silent-fault catalogue, PAR",
        setting=Setting("mlp", 2, ("strategy.init=seed",)),
        patch=own_initial_weights,
        guard="weights",
    ),
    Fault(
        name="momentum forgotten",
        says="With several ranks every update is a first one: momentum is gone.",
        source="silent-fault catalogue, OPT",
        setting=MLP,
        patch=momentum_forgotten,
    ),
    Fault(
        name="frozen in one layout",
        says="With several ranks one weight is not trained.",
        source="TTrace, parameters that are not updated",
        setting=MLP,
        patch=frozen_in_one_layout,
        where=("body.2.weight",),
    ),
)
