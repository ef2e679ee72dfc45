"""Prepares a data set or a stream for a loader: pads its samples or attaches its collate_fn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from paddle_dp.data.collate import CollateFn, Collates, Uncollated
from paddle_dp.data.padding import pad
from paddle_dp.data.sample import Classified, Named
from paddle_dp.data.stream import Stream
from paddle_dp.errors import UsageError
from paddle_dp.recipe.schema import LoaderSettings


class Transformed:
    """`dataset` with `do` applied to each sample; it keeps the names of its classes."""

    def __init__(self, dataset: Any, do: Callable[[Any], Any]):
        self.dataset, self.do = dataset, do
        if isinstance(dataset, Classified):
            self.classes = dataset.classes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.do(self.dataset[index])


class TransformedNamed(Transformed):
    """`Transformed` for a data set with named samples."""

    def name_of(self, index: int) -> str:
        name: str = self.dataset.name_of(index)
        return name


def each(dataset: Any, do: Callable[[Any], Any]) -> Any:
    """The data set or `Stream` with `do` applied to each sample."""
    if isinstance(dataset, Stream):
        return dataset.then(do)
    return (TransformedNamed if isinstance(dataset, Named) else Transformed)(dataset, do)


def prepared(dataset: Any, settings: LoaderSettings, collate_fn: CollateFn | None = None) -> Any:
    """Applies `settings` to a data set or `Stream`; None and a data set without such settings are returned unchanged.

    `collate_fn` replaces the data set's. Raises UsageError for padding together with a collate_fn, and for
    loader.collate: batch without one.
    """
    if dataset is None:
        return None
    collate = _collate_of(dataset) if collate_fn is None else collate_fn
    if collate is None:
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
    return each(dataset, partial(Uncollated, collate=collate, is_global_batch=settings.collate == "batch"))


def _collate_of(dataset: Any) -> CollateFn | None:
    """The data set's collate_fn, or None."""
    source = dataset.source if isinstance(dataset, Stream) else dataset
    return source.collate_fn if isinstance(source, Collates) else None
