"""Several data sets by weights or sizes: exact after any number of samples, and the same on any number of ranks.

Held-out samples are the data sets' held-out samples, all of them, one data set after the other, without weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import PlainSerializer, PlainValidator, ValidationInfo, WithJsonSchema

from paddle_dp.datasets._arrays import checked_split
from paddle_dp.datasets._interleaved import Concatenated, InterleavedSamples, epoch_length
from paddle_dp.errors import DataError, Mistake, RecipeError, UsageError
from paddle_dp.part import ErrorContext, Part, read_part, read_settings
from paddle_dp.part.config import fields_of
from paddle_dp.units import AboveZero, Positive

_EXAMPLE = "[{use: text_files, path: a, weight: 7}, {use: text_files, path: b, weight: 3}]"


@dataclass(frozen=True, kw_only=True)
class SourceWeight:
    """The further key of each data set of a mixture. None for all: their sizes."""

    weight: AboveZero | None = None


@dataclass(frozen=True)
class WeightedSource:
    """A data set of a mixture with its weight, None for its size. `key`: where the recipe has it,
    "dataset.sources.0"."""

    key: str
    dataset: Part
    weight: float | None

    def build(self, split: str) -> Any:
        """The data set. Raises DataError or UsageError with its key in the recipe."""
        try:
            dataset = self.dataset.build(split)
        except (DataError, UsageError) as error:
            if isinstance(error, RecipeError):
                raise
            settings = "|".join(map(re.escape, fields_of(type(self.dataset.config)))) or "use"
            text = re.sub(rf"(?<![\w./])dataset(?=\.(?:{settings})\b)", self.key, str(error))
            raise type(error)(text if self.key in text else f"{self.name}: {text}") from error
        if dataset is not None:
            self._refuse(dataset, split)
        return dataset

    @property
    def name(self) -> str:
        return f"{self.key} ({self.dataset.name})"

    def _refuse(self, dataset: Any, split: str) -> None:
        if hasattr(dataset, "collate_fn"):
            raise UsageError(
                f"{self.name} has a collate_fn, and a mixture has no batches of one data set: let the data set's [i] "
                "give arrays, of equal shapes or with loader.pad"
            )
        try:
            length = len(dataset) if hasattr(dataset, "__getitem__") else -1
        except Exception:  # noqa: BLE001 - Paddle's IterableDataset has a len() that raises
            length = -1
        if length < 1:
            reason = "is a stream: a mixture takes data sets with len() and [i]" if length else "is empty"
            raise UsageError(f"{self.name}, {split} split, {reason}")


def _read(values: Any, info: ValidationInfo) -> tuple[WeightedSource, ...]:
    context = info.context or {}
    home, tries = context.get("home"), context.get("tries", True)
    key = ".".join(filter(None, [context.get("prefix", ""), "sources"]))
    if not isinstance(values, Sequence) or isinstance(values, str) or not values:
        raise ValueError(f"needs a list of data sets with weights, such as {_EXAMPLE}")
    sources: list[WeightedSource] = []
    mistakes: list[Mistake] = []
    for number, value in enumerate(values):
        prefix = f"{key}.{number}"
        owner = ErrorContext(subject=prefix, prefix=prefix)
        settings = dict(value) if isinstance(value, dict) else value
        has_weight = isinstance(settings, dict) and "weight" in settings
        weights = {"weight": settings.pop("weight")} if has_weight else {}
        dataset = weight = None
        try:
            dataset = read_part("datasets", settings, prefix, home, tries=tries)
        except RecipeError as error:
            mistakes += [_within(number, mistake) for mistake in error.mistakes]
        try:
            weight = read_settings(SourceWeight, weights, owner).weight
        except RecipeError as error:
            mistakes += [_within(number, mistake) for mistake in error.mistakes]
        if dataset is not None and dataset.reading != "each":
            text = f"{prefix}.reading: one data set of a mixture cannot be scattered: leave it out"
            mistakes.append(Mistake(where="", message=text, path=(number, "reading")))
        if dataset is not None:
            sources.append(WeightedSource(prefix, dataset, weight))
    with_weight = [source.weight is not None for source in sources]
    if not mistakes and any(with_weight) and not all(with_weight):
        number = with_weight.index(False)
        text = f"{sources[number].key} needs 'weight', as other data sets have one; without any, sizes decide"
        mistakes.append(Mistake(where="", message=text, path=(number, "weight")))
    if mistakes:
        raise RecipeError(mistakes)
    return tuple(sources)


def _within(number: int, mistake: Mistake) -> Mistake:
    return Mistake(where=mistake.where, message=mistake.message, path=(number, *mistake.path))


def _written(sources: Iterable[WeightedSource]) -> list[dict[str, Any]]:
    settings = [{**source.dataset.settings, "weight": source.weight} for source in sources]
    return [
        {key: value for key, value in each.items() if key != "reading" and (key, value) != ("weight", None)}
        for each in settings
    ]


_SCHEMA = {
    "type": "array", "minItems": 1,
    "items": {
        "type": "object", "required": ["use"],
        "properties": {"use": {"type": "string"}, "weight": {"type": "number", "exclusiveMinimum": 0}},
    },
}  # fmt: skip
Sources = Annotated[
    tuple[WeightedSource, ...],
    "list of data sets, each with a weight",
    PlainValidator(_read),
    PlainSerializer(_written),
    WithJsonSchema(_SCHEMA),
]


@dataclass(frozen=True, kw_only=True)
class Config:
    sources: Sources
    """The data sets, parts with a `weight` each:
    `[{use: text_files, path: a, weight: 7}, {use: text_files, path: b, weight: 3}]`. Weights are relative: 0.7 and 0.3
    mean the same. Without any weight an epoch has each sample once."""

    epoch: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """An epoch ends when each data set has given all its samples, and smaller ones some again; or when the first one
    has."""

    samples: Positive | None = None
    """Samples of an epoch, in place of that. A data set continues in the next epoch with the samples that are left."""

    @property
    def length(self) -> int:
        """Tokens of a sample, if the first data set has a `length`; 0 if not."""
        return getattr(self.sources[0].dataset.config, "length", 0)

    @property
    def field(self) -> str | None:
        """The field of a line of the first data set's texts; None if it has none."""
        return getattr(self.sources[0].dataset.config, "field", None)

    @property
    def masks_documents(self) -> bool:
        """Whether samples are packed documents, in any of the data sets."""
        return any(getattr(source.dataset.config, "masks_documents", False) for source in self.sources)

    def build(self, split: str) -> InterleavedSamples | Concatenated | None:
        """The samples of the data sets as they are; None if no data set holds anything out."""
        built = {source.name: source.build(checked_split(split)) for source in self.sources}
        datasets = {name: dataset for name, dataset in built.items() if dataset is not None}
        if split != "train":
            return Concatenated(datasets) if datasets else None
        if absent := [name for name in built if name not in datasets]:
            raise UsageError(f"{absent[0]} has no training data: its train split is None")
        weights = [source.weight for source in self.sources if source.weight is not None]
        sizes = [*map(epoch_length, datasets.values())]
        samples = self.samples or (None if weights else sum(sizes))
        return InterleavedSamples(datasets, weights or sizes, self.epoch, samples)

    def read_file(self, path: Path) -> Any:
        """The file's samples as the first data set reads them, for `predict`."""
        first = self.sources[0]
        if not hasattr(first.dataset.config, "read_file"):
            raise UsageError(f"{path}: {first.name} reads no files, so give arrays")
        return first.dataset.config.read_file(path)
