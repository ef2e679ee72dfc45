"""Builds fleet's parallel layers for one rank of an axis without the other ranks; the layers cannot compute.

Fleet's layers need fleet.init, which needs all ranks; but their constructors only read the group's ranks, a strategy's
settings, and the rank's random stream (Paddle 3.3.1: `fleet.fleet._user_defined_strategy`,
`get_rng_state_tracker().states_`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paddle.distributed import fleet
from paddle.distributed.communication.group import Group
from paddle.distributed.fleet.layers.mpu import random
from paddle.distributed.fleet.utils.log_util import logger

STREAM_SEED = 2**31 - 1  # its initial values are overwritten


@contextmanager
def alone(rank: int, ranks: int) -> Iterator[Any]:
    """Yields a group of `ranks` ranks as seen by `rank`, without the others; build fleet's layers within."""
    owner, tracker, stream = fleet.fleet, random.get_rng_state_tracker(), random.MODEL_PARALLEL_RNG
    settings, new = getattr(owner, "_user_defined_strategy", None), stream not in tracker.states_
    if new:
        tracker.add(stream, STREAM_SEED)
    level = logger.level
    logger.setLevel("WARNING")  # no "distributed strategy initialized" from a command that starts nothing
    owner._user_defined_strategy = settings or fleet.DistributedStrategy()
    logger.setLevel(level)
    try:
        yield Group(rank, -1, list(range(ranks)))
    finally:
        owner._user_defined_strategy = settings
        if new:
            del tracker.states_[stream]
            tracker.seeds_.discard(STREAM_SEED)
