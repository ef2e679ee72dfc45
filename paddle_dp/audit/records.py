"""The events of the hooks, read from files and ordered by rank, pass and update. Does not import paddle."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from paddle_dp.audit import events
from paddle_dp.audit.events import (
    Batches,
    E,
    Ended,
    Event,
    Fetched,
    LoaderCreated,
    PassBegan,
    Seeded,
    Stepped,
)

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Rank:
    """One rank's events, in order of time."""

    number: int
    events: tuple[Event, ...]
    folder: Path

    def events_of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def first(self, kind: type[E]) -> E | None:
        return next(iter(self.events_of(kind)), None)

    @cached_property
    def ended(self) -> Ended | None:
        return self.first(Ended)

    @cached_property
    def seeded(self) -> set[str]:
        """The generators that the script has seeded."""
        return {seed.generator for seed in self.events_of(Seeded)}

    @cached_property
    def updates(self) -> list[Stepped]:
        return self.events_of(Stepped)

    @cached_property
    def loaders(self) -> dict[int, LoaderCreated]:
        return {event.loader: event for event in self.events_of(LoaderCreated)}

    @cached_property
    def passes(self) -> dict[tuple[int, int], PassBegan]:
        return {(begun.loader, begun.number): begun for begun in self.events_of(PassBegan)}

    @cached_property
    def fetched(self) -> dict[tuple[int, int, int], Fetched]:
        return {(batch.loader, batch.number, batch.index): batch for batch in self.events_of(Fetched)}

    def first_pass(self, loader: int) -> list[Fetched]:
        """The batches that the script got in its first pass over a loader."""
        return [batch for batch in self.fetched.values() if (batch.loader, batch.number) == (loader, 1)]

    @cached_property
    def training(self) -> set[int]:
        """The loaders with batches in an update."""
        return {loader for update in self.updates for loader, _, _ in update.batches}

    def sizes(self, update: Stepped) -> tuple[int, ...]:
        """The number of samples in each batch of an update."""
        return tuple(self.fetched[batch].size for batch in update.batches)

    def arrays(self, name: str) -> Arrays:
        """A file of arrays that this rank wrote; empty if there is none."""
        path = self.folder / f"{name}.npz"
        if not name or not path.exists():
            return {}
        with np.load(path, allow_pickle=False) as file:
            return dict(file)


@dataclass(frozen=True)
class EventTrace:
    """The events of one execution of the script, on one rank or several."""

    ranks: tuple[Rank, ...]
    folder: Path

    @classmethod
    def read(cls, folder: Path, ranks: int) -> EventTrace:
        journals = [folder / f"rank-{number}.jsonl" for number in range(ranks)]
        ranks_of = (Rank(number, tuple(events.read(file)), folder) for number, file in enumerate(journals))
        return cls(tuple(ranks_of), folder)

    @cached_property
    def steps(self) -> int:
        """The number of updates that all ranks have done."""
        return min((len(rank.updates) for rank in self.ranks), default=0)

    def together(self, step: int) -> list[Stepped]:
        """The `step`-th update (from 1) of each rank."""
        return [rank.updates[step - 1] for rank in self.ranks]

    @cached_property
    def training(self) -> set[int]:
        return set().union(*(rank.training for rank in self.ranks))

    def loader(self, number: int) -> LoaderCreated | None:
        """The creation of a loader, on the first rank that has it; None if no rank does."""
        return next((rank.loaders[number] for rank in self.ranks if number in rank.loaders), None)

    def orders(self, loader: int, number: int) -> list[Batches | None]:
        """Each rank's batches of one pass; None if it did not begin the pass, or the indices are unknown."""
        begun = [rank.passes.get((loader, number)) for rank in self.ranks]
        return [None if each is None else each.batches for each in begun]

    @cached_property
    def equal_until(self) -> int:
        """The last update before which the weights of all ranks were equal bit by bit; 0 for none."""
        for step in range(1, self.steps + 1):
            updates = self.together(step)
            if any(update.digests != updates[0].digests for update in updates):
                return step - 1
        return self.steps
