"""Dropout's masks: other ones on other ranks, in other slices, and in a forward that backward computes again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tests.proof.zoo.case import Fault, Setting, strategy
from tests.proof.zoo.patching import ranks, replaced

SCOPE = "paddle_dp.core.dropout.scope:Scope"


def places_in_the_own_share() -> AbstractContextManager[None]:
    """Every rank counts its samples from 0, so all shares of a batch have the same masks."""

    def make(init: Callable[..., Any]) -> Callable[..., Any]:
        def local(
            self: Any, seed: int, epoch: int, index: int, first: int, samples: int, places: Any = None
        ) -> None:
            if ranks() > 1:
                first, places = 0, None
            init(self, seed, epoch, index, first, samples, places)

        return local

    return replaced(f"{SCOPE}.__init__", make)


def own_seed() -> AbstractContextManager[None]:
    """Each rank draws from a seed of its own, as Paddle's do by default."""
    from tests.proof.zoo.patching import rank

    def make(init: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, seed, *more: init(self, seed + rank(), *more)

    return replaced(f"{SCOPE}.__init__", make)


def other_masks_again() -> AbstractContextManager[None]:
    """A forward that backward computes again goes on counting calls, and draws what comes next."""
    from paddle_dp.core.dropout.calls import install

    install()
    place = "paddle.distributed.fleet.recompute.recompute:custom_state_manager.custom_set_state_func"
    return replaced(place, lambda restore: lambda saved: None)


def the_first_slice_of_masks() -> AbstractContextManager[None]:
    """Every rank drops what the first rank drops."""

    def make(held: Callable[..., Any]) -> Callable[..., Any]:
        def first(self: Any, shape: tuple[int, ...]) -> Any:
            whole, ranges = held(self, shape)
            return whole, tuple((0, high - low) for low, high in ranges)

        return first

    return replaced(f"{SCOPE}.locate_slice", make)


DROPS = ("model.dropout=0.2",)
FAULTS = (
    Fault(
        name="masks of the own share",
        says="Each rank counts its samples from 0: samples of different shares have the same masks.",
        source="silent-fault catalogue, DATA",
        setting=Setting("mlp", 2, DROPS),
        patch=places_in_the_own_share,
    ),
    Fault(
        name="masks of the own seed",
        says="Each rank draws its masks from a seed of its own.",
        source="Paddle's own dropout under DataParallel",
        setting=Setting("mlp", 2, DROPS),
        patch=own_seed,
    ),
    Fault(
        name="recompute draws again",
        says="What backward computes again drops other activations than the first time.",
        source="TTrace, wrong input of recomputation; DeepSpeed #8357",
        setting=strategy("gpt", data=2, recompute="full").with_(*DROPS),
        patch=other_masks_again,
    ),
    Fault(
        name="masks of the first slice",
        says="On stretches of the sequence every rank drops what the first one drops.",
        source="Megatron-LM, equal seeds in the tensor-parallel region",
        setting=strategy("gpt", tensor=2, sequence_parallel=True).with_(*DROPS),
        patch=the_first_slice_of_masks,
    ),
)
