"""A measurement of some steps: the parts of each rank, and the facts with which they are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paddle_dp.plan.changes import Facts
from paddle_dp.plan.step_parts import RankParts

NOT_MEASURED = (
    "Ranks that do not wait for one another (async_average, parameter_server with mode: async) are not measured: they "
    "have no step in common."
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Where the time of the steps `first` to `last` went, on every rank. `watched`: it is to be shown whole."""

    first: int
    last: int
    parts: list[RankParts]
    facts: Facts
    watched: bool = False

    def as_fields(self) -> dict[str, Any]:
        """For a line of JSON."""
        ranks = [part.as_json() for part in self.parts]
        return {"first": self.first, "last": self.last, "ranks": ranks, "facts": asdict(self.facts)}

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Measured:
        """From a line of metrics.jsonl."""
        parts = [RankParts.of_json(row) for row in fields["ranks"]]
        return cls(first=fields["first"], last=fields["last"], parts=parts, facts=Facts(**fields["facts"]))
