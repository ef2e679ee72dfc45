"""Prepares a data set or a stream for a loader: pads its samples or attaches its collate_fn.

Samples are padded to a given length, which is the same on any number of ranks. Padding to a batch's longest sample
would depend on that number, as a rank sees only its share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from paddle_dp.batch import named_leaves, structure_of, unflatten
from paddle_dp.data.arrays import Array, Arrays, as_arrays
from paddle_dp.data.collate import CollateFn, Collates, Uncollated
from paddle_dp.data.sampler import is_ordered
from paddle_dp.data.stream import Stream, has_method
from paddle_dp.errors import DataError, UsageError, did_you_mean
from paddle_dp.recipe.schema import LoaderSettings, Pad

Pads = Mapping[str, Pad]


_FORWARDED = ("classes", "file_of", "first_samples", "name_of")


class Transformed:
    """`dataset` with `do` applied to each sample; it keeps the names and the order of its samples."""

    def __init__(self, dataset: Any, do: Callable[[Any], Any]):
        self.dataset, self.do = dataset, do
        vars(self).update({name: getattr(dataset, name) for name in _FORWARDED if hasattr(dataset, name)})
        if is_ordered(dataset):
            self.epoch_order = dataset.epoch_order

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.do(self.dataset[index])

    def at_epoch(self, seed: int, epoch: int) -> Any:
        """The data set of this epoch, transformed likewise."""
        if not has_method(self.dataset, "at_epoch"):
            return self
        return type(self)(self.dataset.at_epoch(seed, epoch), self.do)


def each(dataset: Any, do: Callable[[Any], Any]) -> Any:
    """The data set or `Stream` with `do` applied to each sample."""
    return dataset.then(do) if isinstance(dataset, Stream) else Transformed(dataset, do)


def prepared(dataset: Any, settings: LoaderSettings, collate_fn: CollateFn | None = None) -> Any:
    """Applies `settings` to a data set or `Stream`; None and a data set without such settings are returned unchanged.

    `collate_fn` replaces the data set's. Raises UsageError for padding together with a collate_fn, and for
    loader.collate: batch without one.
    """
    if dataset is None:
        return None
    source = dataset.source if isinstance(dataset, Stream) else dataset
    if collate_fn is None and isinstance(source, Collates):
        collate_fn = source.collate_fn
    if collate_fn is None:
        if settings.collate == "batch":
            raise UsageError(
                "loader.collate: batch needs a collate_fn, and there is none: give the data set a method "
                "collate_fn(samples) → (inputs, targets), or leave loader.collate out."
            )
        return each(dataset, partial(pad, pads=settings.pad)) if settings.pad else dataset
    if settings.pad:
        raise UsageError(
            "loader.pad pads the samples of a data set, and this one has a collate_fn, which gets them as they are: "
            "let that pad, or remove one of the two."
        )
    return each(dataset, partial(Uncollated, collate=collate_fn, is_global_batch=settings.collate == "batch"))


def pad(sample: Any, pads: Pads) -> Any:
    """Pads the arrays that `pads` names at the end of their first dim, in a sample (input, target).

    A name follows the sample's structure: "inputs" or "targets" for a single array, "inputs.ids" or "ids" in a dict,
    "inputs[0]" in a tuple. Raises DataError for an array longer than its padded length, UsageError for a name that no
    array has. Anything but a pair is returned as it is; the reader raises an error for it.
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
    with np.errstate(all="ignore"):
        value = np.asarray(to.value).astype(leaf.dtype)
    if leaf.dtype.kind in "biu" and value != to.value:
        raise UsageError(
            f"loader.pad.{name}.value: {name} is of type {leaf.dtype}, which has no {to.value:g}: give another value, "
            "or the array another type in the data set."
        )
    rest = [(0, to.length - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)]
    return np.pad(leaf, rest, constant_values=value)


def _with(inputs: Arrays, masks: dict[str, Array]) -> Arrays:
    """Adds the masks to the inputs. Raises UsageError if the inputs are no dict or have the same name already."""
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
