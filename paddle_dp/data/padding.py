"""Samples of unequal lengths, padded to a length that is given: the same on any number of ranks.

Not to the longest of a batch: a rank's share of a batch has another longest sample on each number of ranks, and what a
model makes of padding would be another number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paddle_dp.data.arrays import Array, Arrays, as_arrays
from paddle_dp.errors import DataError, UsageError, did_you_mean
from paddle_dp.recipe.schema import Pad
from paddle_dp.structure import named_leaves, structure_of, unflatten

Pads = Mapping[str, Pad]


def pad(sample: Any, pads: Pads) -> Any:
    """(input, target) with the arrays that `pads` names padded at the end of their first dim.

    Names are those of a sample's structure: «inputs» and «targets» where these are single arrays, «inputs.ids» or just
    «ids» of a dict, «inputs[0]» of a tuple. Raises DataError for an array that is longer than its padding makes it,
    UsageError for a name that no array has. What is no sample is left to the reader's own error.
    """
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        return sample
    sides = {"inputs": as_arrays(sample[0]), "targets": as_arrays(sample[1])}
    masks: dict[str, Array] = {}
    left = dict(pads)
    for side, arrays in sides.items():
        leaves = []
        for path, leaf in named_leaves(arrays):
            full = f"{side}{path if path.startswith('[') or not path else f'.{path}'}"
            name = next((name for name in (full, path) if name and name in left), None)
            if name is None:
                leaves.append(leaf)
                continue
            chosen = left.pop(name)
            leaves.append(_padded(leaf, chosen, name))
            if chosen.mask is not None:
                masks[chosen.mask] = np.arange(chosen.length) < len(leaf)
        sides[side] = unflatten(structure_of(arrays), leaves)
    if left:
        known = [f"{side}.{path}".strip(".") for side in sides for path, _ in named_leaves(sides[side])]
        name = next(iter(left))
        raise UsageError(
            f"loader.pad: no array of a sample is called '{name}'.{did_you_mean(name, known, 'There are')}"
        )
    return _with(sides["inputs"], masks), sides["targets"]


def _padded(leaf: Array, to: Pad, name: str) -> Array:
    if not leaf.ndim:
        raise DataError(f"{name} is a single number, and loader.pad.{name} gives it a length")
    if len(leaf) > to.length:
        raise DataError(
            f"{name} is {len(leaf)} long, and loader.pad.{name}.length is {to.length}: cut it in the data set, or "
            "raise that"
        )
    value = _value(leaf, to, name)
    rest = [(0, to.length - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)]
    return np.pad(leaf, rest, constant_values=value)


def _value(leaf: Array, to: Pad, name: str) -> Array:
    """What is filled in, in the array's dtype. Raises UsageError where that dtype has no such number."""
    with np.errstate(all="ignore"):
        value = np.asarray(to.value).astype(leaf.dtype)
    if leaf.dtype.kind in "biu" and value != to.value:
        raise UsageError(
            f"loader.pad.{name}.value: {name} is of type {leaf.dtype}, which has no {to.value:g}: give another value, "
            "or the array another type in the data set."
        )
    return value


def _with(inputs: Arrays, masks: dict[str, Array]) -> Arrays:
    """The inputs with masks beside them. Raises UsageError where they have no names."""
    if not masks:
        return inputs
    if not isinstance(inputs, dict):
        raise UsageError(
            f"loader.pad: the mask '{next(iter(masks))}' goes to the model by its name, so inputs must be a dict: "
            '{"ids": …}.'
        )
    if both := masks.keys() & inputs.keys():
        raise UsageError(
            f"loader.pad: the inputs have a '{min(both)}' already: call the mask something else."
        )
    return {**inputs, **masks}
