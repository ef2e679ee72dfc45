"""A measurement of some steps: each rank's times, and the facts for judging them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paddle_dp.plan.changes import Facts
from paddle_dp.plan.rank_times import RankTimes

NOT_MEASURED = (
    "Ranks that do not wait for one another (async_average, parameter_server with mode: async) are not measured: they "
    "have no step in common."
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The times of the steps `first` to `last` on every rank. `watched`: the screen shows the whole report."""

    first: int
    last: int
    rank_times: list[RankTimes]
    facts: Facts
    watched: bool = False

    def as_fields(self) -> dict[str, Any]:
        """The fields of a line of metrics.jsonl."""
        ranks = [times.as_json() for times in self.rank_times]
        return {"first": self.first, "last": self.last, "ranks": ranks, "facts": asdict(self.facts)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Measured:
        """Reads the fields of a line of metrics.jsonl."""
        rank_times = [RankTimes.from_json(row) for row in fields["ranks"]]
        return cls(
            first=fields["first"], last=fields["last"], rank_times=rank_times, facts=Facts(**fields["facts"])
        )
