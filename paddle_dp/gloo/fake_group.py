"""Fleet's parallel layers for one rank of an axis whose other ranks are not there: to be built, never to compute.

Fleet's layers want fleet.init, which wants all ranks. What they really ask while they are built is their group's
numbers, a strategy's settings, and the random stream of their own rank (Paddle 3.3.1:
`fleet.fleet._user_defined_strategy`, `get_rng_state_tracker().states_`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle.distributed import fleet
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.layers.mpu import random
from paddle.distributed.fleet.utils.log_util import logger

STREAM_SEED = 2**31 - 1  # of numbers that nobody learns from


@contextmanager
def alone(rank: int, ranks: int) -> Iterator[Any]:
    """A group of `ranks` in which only `rank` is here; inside, fleet's layers can be built with it."""
    owner, tracker, stream = fleet.fleet, random.get_rng_state_tracker(), random.MODEL_PARALLEL_RNG
    settings, new = getattr(owner, "_user_defined_strategy", None), stream not in tracker.states_
    if new:
        tracker.add(stream, STREAM_SEED)
    level = logger.level
    # «distributed strategy initialized», on the screen of a command that starts nothing
    logger.setLevel("WARNING")
    owner._user_defined_strategy = settings or fleet.DistributedStrategy()
    logger.setLevel(level)
    try:
        yield Group(rank, -1, list(range(ranks)))
    finally:
        owner._user_defined_strategy = settings
        if new:
            del tracker.states_[stream]
            tracker.seeds_.discard(STREAM_SEED)
