"""Digests of the states of the three random generators: they show draws, and ranks with equal states."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paddle

from paddle_dp.audit.events import EventJournal, Seeded
from paddle_dp.audit.hooks.arrays import crc
from paddle_dp.audit.hooks.source_line import direct, here
from paddle_dp.audit.hooks.watch import wrap


def states() -> dict[str, str]:
    """A digest of the current state of each generator; it draws nothing."""
    return {"paddle": _paddle(), "numpy": _numpy(), "random": crc(repr(random.getstate()).encode())}


def moved(before: dict[str, str], after: dict[str, str]) -> tuple[str, ...]:
    """The generators with another state."""
    return tuple(name for name in after if before.get(name, after[name]) != after[name])


def _paddle() -> str:
    return crc(b"".join(repr(state.__getstate__()).encode() for state in paddle.get_rng_state()))


def _numpy() -> str:
    _, keys, *rest = np.random.get_state()  # the legacy form is a tuple
    return crc(np.asarray(keys).tobytes() + repr(rest).encode())


def watch_seeds(journal: EventJournal) -> None:
    """Records the generators that the script itself seeds; seeding by a library, as for workers, is left out."""
    for module, generator in ((paddle, "paddle"), (np.random, "numpy"), (random, "random")):
        wrap(module, "seed", partial(_note_seed, journal, generator))


def _note_seed(
    journal: EventJournal, generator: str, seed: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if direct():
        value = repr(next(iter((*args, *kwargs.values())), None))
        journal.write(Seeded(generator=generator, value=value[:40], where=here()))
    return seed(*args, **kwargs)
