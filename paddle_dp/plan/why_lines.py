"""Where a step's time goes, in 80 columns: a table, the slowest rank, and what would make the step shorter."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from statistics import median

from paddle_dp.plan.changes import MATTERS, SHORT, Change, Facts, changes, workers_that_would_do
from paddle_dp.plan.measured import Measured
from paddle_dp.plan.step_parts import RankParts, slowest

WIDTH = 80
MOST = 8  # ranks in the table: of more, those with the longest own time
ENOUGH = 10  # steps from which something is concluded
BUSY = 1.5  # processes that want to compute for each core, from which the machine is also somebody else's
STARVED = 0.2  # of the time waiting for data, from which on the screen says so during training
_COLUMNS = ("data", "forward", "backward", "exchange", "hidden", "waits for", "update", "callbacks", "other")
_WIDTHS = (7, 8, 9, 9, 7, 11, 7, 10, 6)


def lines(measured: Measured) -> list[str]:
    """All that is to be said of the steps that were measured."""
    parts, facts, first, last = measured.parts, measured.facts, measured.first, measured.last
    step = max(part.step for part in parts)
    found = [
        f"Where a step of {_shown(step)} ms goes, in ms (steps {first} to {last}):",
        *_table(parts),
        *_servers(facts.servers),
        *_wrapped(_sentence(parts)),
        *_sent(facts, len(parts)),
    ]
    if doubt := unsure(measured):
        return [*found, *_wrapped(doubt)]
    return [*found, *_advice(step, changes(parts, facts))]


def unsure(measured: Measured) -> str:
    """Why nothing is concluded from these steps; "" where they are enough, and the machine was this job's."""
    steps, facts = measured.last - measured.first + 1, measured.facts
    if steps < ENOUGH:
        return f"No advice from {steps} step{'s' * (steps > 1)}: at least {ENOUGH} are needed: train longer."
    if facts.device == "cpu" and facts.load > BUSY * max(facts.cores, facts.local_ranks):
        return (
            f"No advice: some {facts.load:.0f} processes wanted to compute on {facts.cores} cores, so these times are "
            "others' work, too. Measure again when the machine is free."
        )
    return ""


def starved(measured: Measured) -> str:
    """«82 % of the time waits for data: loader.num_workers=3 would do …»; "" unless it is a fifth and workers help."""
    parts, facts = measured.parts, measured.facts
    step, read = max(part.step for part in parts), max(part.data for part in parts)
    needed, seconds = workers_that_would_do(parts, facts)
    if step < SHORT or read < STARVED * step or needed == facts.num_workers or seconds > 0.9 * step:
        return ""
    return (
        f"{read / step:.0%} of the time waits for data: loader.num_workers={needed} would do "
        f"({facts.num_workers} now; {_shown(step)} → {_shown(seconds)} ms a step)"
    )


def _table(parts: Sequence[RankParts]) -> Iterator[str]:
    yield "rank" + "".join(name.rjust(width) for name, width in zip(_COLUMNS, _WIDTHS, strict=True))
    shown = sorted(sorted(parts, key=lambda part: -part.own)[:MOST], key=lambda part: part.rank)
    for part in shown:
        cells = [part.data, part.forward, part.backward, part.exchange, part.hidden]
        words = [*map(_number, cells), _waits(part), *map(_number, (part.update, part.callbacks, part.other))]
        yield f"{part.rank:4}" + "".join(
            word.rjust(width) for word, width in zip(words, _WIDTHS, strict=True)
        )
    if len(parts) > len(shown):
        yield f"({len(parts) - len(shown)} ranks with less work of their own are not shown)"


def _servers(count: int) -> Iterator[str]:
    if count:
        yield "Rank 0 is a server." if count == 1 else f"Ranks 0 to {count - 1} are servers."


def _sent(facts: Facts, ranks: int) -> Iterator[str]:
    if facts.sent and ranks > 1:
        mean = ", servers and workers in the mean" if facts.servers else ""
        yield f"A rank sends {facts.sent / 1e6:.3g} MB a step{mean}."


def _waits(part: RankParts) -> str:
    """«12.3 r1»: how long, and for which rank most of it."""
    if _number(part.waiting) == "·":
        return "·"
    return f"{_number(part.waiting)} r{max(part.waits_for, key=lambda rank: part.waits_for[rank])}"


def _sentence(parts: Sequence[RankParts]) -> str:
    step, found = max(part.step for part in parts), slowest(parts)
    if found is None or found[1] < 0.02 * step:
        one = max(parts, key=lambda part: part.own)
        where = max(
            ("data", "forward", "backward", "exchange", "update", "callbacks"), key=lambda p: getattr(one, p)
        )
        even = "No rank waits for another; most" if len(parts) > 1 else "Most"
        return f"{even} of the step is {where}: {getattr(one, where) / step:.0%}.{_called(one, where)}"
    one, lost, where = found
    others = [getattr(other, where) for other in parts if other is not one]
    if one.own - median(other.own for other in parts if other is not one) < lost / 4:
        return f"The ranks wait for each other, {_shown(lost)} ms of each step, though none has more to do than others."
    return (
        f"Slowest is rank {one.rank} on {one.host}: the others wait {_shown(lost)} ms of each step for it. Most of "
        f"that is {where}, {_shown(getattr(one, where))} ms, for the others {_shown(sum(others) / len(others))}."
        f"{_called(one, where)}"
    )


def _called(one: RankParts, where: str) -> str:
    if where != "callbacks" or not one.works:
        return ""
    name = max(one.works, key=lambda each: one.works[each])
    return f" {name} takes {_shown(one.works[name])} ms of it."


def _advice(step: float, found: Sequence[Change]) -> Iterator[str]:
    if not found:
        yield f"Nothing that is known here would gain {100 * MATTERS:.0f} %."
        return
    for change, word in zip(found[:3], ("Change", "or", "or"), strict=False):
        faster = f"{_shown(step)} → {_shown(change.seconds)} ms, {step / change.seconds:.3g} × as fast"
        yield from _wrapped(f"{word}: {change.what}: {faster}. {change.why[:1].upper()}{change.why[1:]}.")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _number(seconds: float) -> str:
    """Milliseconds in at most six characters; «·» for what is nothing."""
    ms = seconds * 1e3
    return "·" if ms < 0.005 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 1000 else f"{ms:.0f}"


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"
