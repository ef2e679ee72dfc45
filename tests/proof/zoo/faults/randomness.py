"""Dropout's masks: other ones on other ranks, in other slices, and in a forward that backward computes again."""

from __future__ import annotations

from tests.proof.zoo.case import FaultTable, Setting, strategy
from tests.proof.zoo.patching import rank, ranks

SCOPE = "paddle_dp.core.dropout.scope:Scope"
DROPS = ("model.dropout=0.2",)
MLP = Setting("mlp", 2, DROPS)
FAULTS = FaultTable()


@FAULTS.add("masks of the own share", "silent-fault catalogue, DATA", MLP, f"{SCOPE}.__init__")
def positions_in_the_own_share(init, scope, seed, epoch, index, first, samples, places=None):
    """Each rank counts its samples from 0: samples of different shares have the same masks."""
    if ranks() > 1:
        first, places = 0, None
    init(scope, seed, epoch, index, first, samples, places)


@FAULTS.add("masks of the own seed", "Paddle's own dropout under DataParallel", MLP, f"{SCOPE}.__init__")
def own_seed(init, scope, seed, *more):
    """Each rank draws its masks from a seed of its own."""
    init(scope, seed + rank(), *more)


def already_installed(install):
    """Replaces Paddle's functions before the fault does, and not in the run."""
    install()
    return install


@FAULTS.add(
    "recompute draws again",
    "TTrace, wrong input of recomputation; DeepSpeed #8357",
    strategy("gpt", data=2, recompute="full").with_(*DROPS),
    "paddle.distributed.fleet.recompute.recompute:custom_state_manager.custom_set_state_func",
    also=(("paddle_dp.core.dropout.calls:install", already_installed),),
)
def other_masks_again(restore, saved):
    """What backward computes again drops other activations than the first time."""


@FAULTS.add(
    "masks of the first slice",
    "Megatron-LM, equal seeds in the tensor-parallel region",
    strategy("gpt", tensor=2, sequence_parallel=True).with_(*DROPS),
    f"{SCOPE}.locate_slice",
)
def the_first_slice_of_masks(locate, scope, shape):
    """On stretches of the sequence every rank drops what the first one drops."""
    whole, ranges = locate(scope, shape)
    return whole, tuple((0, high - low) for low, high in ranges)
