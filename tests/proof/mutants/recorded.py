"""What ranks with a mutant have recorded beside what the clean ranks have: the same, but for rounding, or not."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from typing import Any

import numpy as np

from paddle_dp.proof.sides import Side
from paddle_dp.proof.trace_files import Key, Sheet, Trace

# The relative 2-norm by which numbers of a step and kind may differ and be the same but for rounding. In 16 bits only
# the numbers in float64 tell.
ROUNDING = {"float64": 1e-9, "float32": 1e-4, "float16": np.inf, "bfloat16": np.inf}
# What optimizers make of gradients: Adam makes a whole step of one that is rounding only.
UPDATED = ("update", "state", "weight")


def digests(side: Side) -> tuple[str, str]:
    """Of all numbers that a side recorded to be judged, rank by rank; and of all else that its verdict may hang on."""
    numbers, timeless = hashlib.blake2b(digest_size=8), [_without(side.facts, "memory", "held")]
    for trace in filter(None, map(side.trace, ("wide", "own"))):
        for sheet in trace.sheets:
            for key in _judged(sheet):
                numbers.update(key.encode() + sheet.array("shard", key).tobytes())
            numbers.update(json.dumps(sheet.facts["rows"]).encode())
            timeless.append(_without(sheet.facts, "rows", "seconds"))
    facts = hashlib.blake2b(json.dumps(timeless, sort_keys=True).encode(), digest_size=8)
    return numbers.hexdigest(), facts.hexdigest()


def only_rounding(clean: Trace | None, other: Trace | None) -> bool:
    """Whether two traces of the same ranks differ by rounding at the most: in samples not at all, in the numbers of
    each step and kind by `ROUNDING`."""
    if clean is None or other is None:
        return clean is other
    apart: dict[tuple[str, int], float] = defaultdict(float)
    size: dict[tuple[str, int], float] = defaultdict(float)
    for a, b in zip(clean.sheets, other.sheets, strict=True):
        if _judged(a) != _judged(b) or _samples(a) != _samples(b):
            return False
        for key in _judged(a):
            kind, step, _ = Key.read(key)
            if kind in UPDATED:
                continue
            one, two = (sheet.array("shard", key).astype("float64") for sheet in (a, b))
            if one.shape != two.shape:
                return False
            apart[kind, step] += float(np.square(one - two).sum())
            size[kind, step] += float(np.square(one).sum())
    limit = ROUNDING[clean.facts["dtype"]] ** 2
    return all(apart[each] == 0 or apart[each] <= limit * size[each] for each in apart)


def _judged(sheet: Sheet) -> list[str]:
    """The keys of a rank's numbers that `verify` judges.

    Not the outputs of layers: they say where a difference begins, and are none by themselves. A layer that is called
    once more, or whose output a norm or a softmax makes the same again, changes no loss, score, gradient, weight,
    buffer or evaluation, and of a training nothing else is kept. Nor copies of what another rank has, of which only a
    sentence is made.
    """
    return sorted(sheet.group("shard"))


def _samples(sheet: Sheet) -> Any:
    return [(row["samples"], row["empty"], row["shares"], row["read"]) for row in sheet.facts["rows"]]


def _without(facts: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name not in names}
