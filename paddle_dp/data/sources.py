"""Data sets that are made of others, such as a mixture: the first sample of each has to fit the others and the loss.

A batch with samples of all of them may come late, or not among the first that are tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from paddle_dp.batch import leaves
from paddle_dp.data.arrays import Arrays, Pair, describe
from paddle_dp.data.randomness import restoring_globals
from paddle_dp.data.sample import read_seeded
from paddle_dp.errors import UsageError


@runtime_checkable
class OfSources(Protocol):
    """A data set that is made of others."""

    def first_samples(self) -> Mapping[str, int]:
        """The index of the first sample of each, by its name in messages."""


def sources_targets(dataset: Any, seed: int) -> dict[str, Arrays]:
    """The target of the first sample of each source; {} for a data set without sources. Raises UsageError for two of
    other structures, shapes or dtypes."""
    first_samples = dataset.first_samples() if isinstance(dataset, OfSources) else {}
    with restoring_globals():
        pairs = {name: read_seeded(dataset, seed, 0, index) for name, index in first_samples.items()}
    names = [*pairs]
    for name in names[1:]:
        first, other = (_form(pairs[each]) for each in (names[0], name))
        if first != other:
            raise UsageError(
                f"samples of {name} are {other}, and of {names[0]} {first}: they cannot be stacked to a batch. "
                "Take data sets of one kind, and give samples one length (loader.pad)."
            )
    return {name: targets for name, (_, targets) in pairs.items()}


def refuse_targets(targets: Mapping[str, Arrays], loss: Any) -> None:
    """Raises UsageError for targets that are no class and that a loss of class numbers does not leave out; `loss` has
    the one that it leaves out as `ignored`."""
    ignored = getattr(loss, "ignored", None)
    if type(ignored) is not int:
        return
    for name, arrays in targets.items():
        for numbers in (leaf for leaf in leaves(arrays) if leaf.dtype.kind == "i"):
            wrong = numbers[(numbers < 0) & (numbers != ignored)]
            if wrong.size:
                value = int(wrong.flat[0])
                raise UsageError(
                    f"{name} has targets {value}, which are no class: leave them out of the loss, "
                    f"loss.ignore_index={value}."
                )


def _form(pair: Pair) -> str:
    inputs, targets = pair
    return f"input {describe(inputs)}, target {describe(targets)}"
