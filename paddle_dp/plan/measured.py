"""A measurement of some steps: each rank's times, the facts for judging them, and a report in 80 columns.

The report has a table, the slowest rank, and changes that shorten the step.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from paddle_dp.plan.changes import MATTERS, SHORT, Facts, TuningAdvice, changes, workers_that_would_do
from paddle_dp.plan.rank_times import RankTimes, slowest
from paddle_dp.text import duration, plural

NOT_MEASURED = (
    "Ranks that do not wait for one another (async_average, parameter_server with mode: async) are not measured: they "
    "have no step in common."
)
WIDTH = 80
MAX_RANKS_SHOWN = 8  # rows of the table: with more ranks, the ones with the most work
ENOUGH = 10  # steps that advice needs
BUSY = 1.5  # processes per core that want to compute; with more, other jobs use the machine, too
STARVED = 0.2  # of the time waiting for data; with more, a line on the screen during training reports it
_COLUMNS = ("data", "forward", "backward", "exchange", "hidden", "waits for", "update", "callbacks", "other")
_WIDTHS = (7, 8, 9, 9, 7, 11, 7, 10, 6)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The times of the steps `first` to `last` on every rank. `is_shown`: the screen shows the whole report."""

    first: int
    last: int
    rank_times: list[RankTimes]
    facts: Facts
    is_shown: bool = False

    def as_fields(self) -> dict[str, Any]:
        """The fields of a line of metrics.jsonl, which `from_fields` reads."""
        ranks = [times.as_json() for times in self.rank_times]
        return {"first": self.first, "last": self.last, "ranks": ranks, "facts": asdict(self.facts)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Measured:
        rank_times, facts = [RankTimes.from_json(row) for row in fields["ranks"]], Facts(**fields["facts"])
        return cls(first=fields["first"], last=fields["last"], rank_times=rank_times, facts=facts)

    def report(self) -> list[str]:
        rank_times, facts = self.rank_times, self.facts
        step = max(times.step for times in rank_times)
        head = f"Where a step of {duration(step)} goes, in ms (steps {self.first} to {self.last}):"
        lines = [head, *_table(rank_times)]
        if not facts.all_read:
            last = facts.servers - 1
            lines.append(f"Ranks 0 to {last} are servers." if last else "Rank 0 is a server.")
        lines += _wrapped(_sentence(rank_times))
        if facts.sent and len(rank_times) > 1:
            mean = "" if facts.all_read else ", servers and workers in the mean"
            lines.append(f"A rank sends {facts.sent / 1e6:.3g} MB a step{mean}.")
        if doubt := self.doubt():
            return [*lines, *_wrapped(doubt)]
        return [*lines, *_advice(step, changes(rank_times, facts))]

    def doubt(self) -> str:
        """The reason why these steps give no advice; "" if they are enough and no other job used the machine."""
        steps, facts = self.last - self.first + 1, self.facts
        if steps < ENOUGH:
            return f"No advice from {plural(steps, 'step')}: at least {ENOUGH} are needed: train longer."
        if facts.device == "cpu" and facts.load > BUSY * max(facts.cores, facts.local_ranks):
            return (
                f"No advice: some {facts.load:.0f} processes wanted to compute on {facts.cores} cores, so these times "
                "are others' work, too. Measure again when the machine is free."
            )
        return ""

    def starvation(self) -> str:
        """ "82 % of the time waits for data: loader.num_workers=3 would do …"; "" below 20 %, or if workers do not
        help."""
        rank_times, facts = self.rank_times, self.facts
        step, read = max(times.step for times in rank_times), max(times.data for times in rank_times)
        needed, seconds = workers_that_would_do(rank_times, facts)
        if step < SHORT or read < STARVED * step or needed == facts.num_workers or seconds > 0.9 * step:
            return ""
        return (
            f"{read / step:.0%} of the time waits for data: loader.num_workers={needed} would do "
            f"({facts.num_workers} now; {duration(step)} → {duration(seconds)} a step)"
        )


def _table(rank_times: Sequence[RankTimes]) -> Iterator[str]:
    yield "rank" + "".join(map(str.rjust, _COLUMNS, _WIDTHS))
    shown = sorted(rank_times, key=lambda times: -times.work)[:MAX_RANKS_SHOWN]
    for times in sorted(shown, key=lambda times: times.rank):
        before = [times.data, times.forward, times.backward, times.exchange, times.hidden]
        after = [times.update, times.callbacks, times.other]
        texts = [*map(_number, before), _waits(times), *map(_number, after)]
        yield f"{times.rank:4}" + "".join(map(str.rjust, texts, _WIDTHS))
    if len(rank_times) > len(shown):
        yield f"({len(rank_times) - len(shown)} ranks with less work are not shown)"


def _waits(times: RankTimes) -> str:
    """ "12.3 r1": milliseconds of waiting, and the rank that caused most of them."""
    if _number(times.waiting) == "·":
        return "·"
    return f"{_number(times.waiting)} r{max(times.waits_for, key=lambda rank: times.waits_for[rank])}"


def _sentence(rank_times: Sequence[RankTimes]) -> str:
    step, straggler = max(times.step for times in rank_times), slowest(rank_times)
    if straggler is None or straggler[1] < 0.02 * step:
        late = max(rank_times, key=lambda times: times.work)
        components = ("data", "forward", "backward", "exchange", "update", "callbacks")
        component = max(components, key=lambda name: getattr(late, name))
        even = "No rank waits for another; most" if len(rank_times) > 1 else "Most"
        return f"{even} of the step is {component}: {getattr(late, component) / step:.0%}.{_called(late, component)}"
    late, lost, component = straggler
    usual = [getattr(other, component) for other in rank_times if other is not late]
    if late.work - median(other.work for other in rank_times if other is not late) < lost / 4:
        return f"The ranks wait for each other, {duration(lost)} of each step, though none has more to do than others."
    return (
        f"Slowest is rank {late.rank} on {late.host}: the others wait {duration(lost)} of each step for it. Most of "
        f"that is {component}, {duration(getattr(late, component))}, for the others "
        f"{duration(sum(usual) / len(usual))}.{_called(late, component)}"
    )


def _called(times: RankTimes, component: str) -> str:
    if component != "callbacks" or not times.works:
        return ""
    name = max(times.works, key=lambda each: times.works[each])
    return f" {name} takes {duration(times.works[name])} of it."


def _advice(step: float, proposals: Sequence[TuningAdvice]) -> Iterator[str]:
    if not proposals:
        yield f"Nothing that is known here would gain {100 * MATTERS:.0f} %."
        return
    for change, prefix in zip(proposals[:3], ("Change", "or", "or"), strict=False):
        faster = f"{duration(step)} → {duration(change.seconds)}, {step / change.seconds:.3g} × as fast"
        yield from _wrapped(f"{prefix}: {change.what}: {faster}. {change.why[:1].upper()}{change.why[1:]}.")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _number(seconds: float) -> str:
    """Milliseconds in at most six characters; "·" below 0.005."""
    ms = seconds * 1e3
    return "·" if ms < 0.005 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"
