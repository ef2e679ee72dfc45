"""The events that a rank's hooks record, one JSON line each, written at once to survive a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

Batches = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event in a rank; `where` is the script's "file:line", "" if unknown."""

    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Seeded(Event):
    """The script has seeded `generator`: "paddle", "numpy" or "random"."""

    generator: str
    value: str


@dataclass(frozen=True, kw_only=True)
class LoaderCreated(Event):
    """The `loader`-th DataLoader of this rank; `samples` is its data set's length, None for a stream."""

    loader: int
    samples: int | None
    dataset: str
    sampler: str
    batch_size: int | None
    drop_last: bool
    workers: int


@dataclass(frozen=True, kw_only=True)
class PassBegan(Event):
    """The script begins to iterate a loader, for the `number`-th time (from 1).

    `batches`: sample indices of all batches of this pass, also of skipped ones; None if unknown or endless. `drew`: the
    generators that drew the order. `managed`: `paddle.Model` iterates, and drops repeated samples of an evaluation.
    """

    loader: int
    number: int
    batches: Batches | None
    drew: tuple[str, ...]
    managed: bool


@dataclass(frozen=True, kw_only=True)
class Fetched(Event):
    """The script got a batch of `size` samples: batch `index` (from 0) of pass `number`.

    `rows`: digests of its samples if indices are unknown. `drew`: generators that moved since the previous batch.
    `states`: digests of the generators now.
    """

    loader: int
    number: int
    index: int
    size: int
    rows: tuple[str, ...]
    drew: tuple[str, ...]
    states: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class OptimizerCreated(Event):
    """An optimizer, with the digest of each of its parameters."""

    parameters: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Wrapped(Event):
    """`paddle.DataParallel` wrapped a model: digests of its parameters `before` its broadcast."""

    before: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Stepped(Event):
    """The `optimizer`-th optimizer of this rank is about to do an update, with these weights.

    `batches`: (loader, pass, index) of the batches since the previous update. `missing`: parameters without a gradient.
    `drew`: whether Paddle's generator moved since the first of those batches (by random masks, say). `arrays`: the file
    with weights, gradients and batches of this step, "" if they were not recorded.
    """

    optimizer: int
    digests: dict[str, str]
    missing: tuple[str, ...]
    batches: tuple[tuple[int, int, int], ...]
    drew: bool
    scale: float
    arrays: str


@dataclass(frozen=True, kw_only=True)
class FinalWeights(Event):
    """Digests of the weights after the last recorded update; `arrays` is a file with some of their numbers."""

    digests: dict[str, str]
    arrays: str


@dataclass(frozen=True, kw_only=True)
class ModelSplit(Event):
    """Fleet splits the model itself: the degrees above 1, of all axes but data."""

    degrees: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class BatchNormLayers(Event):
    """The BatchNorm layers at the first update: `layers` that normalise over this rank's samples alone."""

    layers: tuple[str, ...]
    synchronised: int


@dataclass(frozen=True, kw_only=True)
class RunningMeans(Event):
    """The first numbers of the running means of local BatchNorm layers at the end."""

    means: dict[str, tuple[float, ...]]


@dataclass(frozen=True, kw_only=True)
class Exchanged(Event):
    """The script called a collective; `values` are the first numbers of its tensor, before."""

    collective: str
    values: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """The script is over; `reason`: "limit" (the audit has enough), "script" (it ended), "failed" or "silent"."""

    reason: str
    message: str = ""


KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in Event.__subclasses__()}
E = TypeVar("E", bound=Event)


class EventJournal:
    """Writes events to a file of `folder`, each with one write, and counts them.

    Forked processes, such as a loader's workers, write nothing.
    """

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank, self.written, self._pid = folder, rank, 0, os.getpid()
        self._file = (folder / f"rank-{rank}.jsonl").open("w", buffering=1)

    def write(self, event: Event) -> None:
        if os.getpid() != self._pid:
            return
        self._file.write(json.dumps([type(event).__name__, asdict(event)]) + "\n")
        self._file.flush()
        self.written += 1


def read(path: Path) -> Iterator[Event]:
    """The events of one rank's file, without a last line that a kill cut off."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            name, values = json.loads(line)
        except ValueError:
            continue
        kind = KINDS[name]
        yield kind(**{f.name: _tuples(values[f.name]) for f in fields(kind)})


def _tuples(value: Any) -> Any:
    """Turns JSON's lists back into tuples."""
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {key: _tuples(each) for key, each in value.items()} if isinstance(value, dict) else value
