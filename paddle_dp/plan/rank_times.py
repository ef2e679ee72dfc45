"""Where a step's time went on each rank, from the ranks' tapes: arithmetic on numbers that all ranks gathered.

A wait for others ends when all have come and the bytes are there. Until the last rank came it was for that rank
(`waiting`), afterwards it was for the wire (`exchange`). A rank that waited itself meanwhile is not to blame, but what
it waited for is. What was carried while the rank did something else is `hidden`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

Tapes = Sequence[Mapping[str, Any]]
"""Of each rank: `host`; `zero`, when the first step began; `seconds` and `steps` measured; `tape` (mesh/tape.py);
`alone`: seconds that a step's gradients take when nothing else is done, 0 if not measured; `bare`: seconds of a step's
backward without exchange, or None; `busy`: CPU seconds of the process, `workers_busy` of its data workers."""

COMPONENT_OF_PHASE = {
    "data": "data", "forward": "forward", "backward": "backward", "exchange": "exchange", "update": "update",
    "evaluate": "callbacks", "checkpoint": "callbacks", "callbacks": "callbacks",
}  # fmt: skip
_WIRE = -1
WORK_COMPONENTS = ("data", "forward", "backward", "update", "callbacks")


@dataclass(kw_only=True)
class RankTimes:
    """Seconds of one rank's step. `exchange` is what it waited for the wire, `waiting` for ranks that came later, by
    rank in `waits_for`; `hidden` was carried beside its own work, and is no part of `step`.

    `wire`: the exchange by the phase in which it was; `exchanges`: how many a step. `works`: seconds of each callback.
    `reading_on_core`: the share of `data` in which a core was used; `busy`, `workers_busy`: CPU seconds.
    """

    rank: int
    host: str
    step: float
    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    exchange: float = 0.0
    hidden: float = 0.0
    waiting: float = 0.0
    update: float = 0.0
    callbacks: float = 0.0
    exchanges: float = 0.0
    busy: float = 0.0
    workers_busy: float = 0.0
    reading_on_core: float = 1.0
    waits_for: dict[int, float] = field(default_factory=dict)
    wire: dict[str, float] = field(default_factory=dict)
    works: dict[str, float] = field(default_factory=dict)

    @property
    def work(self) -> float:
        """What the rank itself did, without waiting."""
        return sum(getattr(self, component) for component in WORK_COMPONENTS)

    @property
    def other(self) -> float:
        """What no phase accounts for."""
        return max(0.0, self.step - self.work - self.exchange - self.waiting)

    def as_json(self) -> dict[str, Any]:
        """Rounded to 0.1 µs."""
        return {
            name: {str(key): round(one, 7) for key, one in value.items()} if isinstance(value, dict)
            else round(value, 7) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }  # fmt: skip

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RankTimes:
        waits_for = {int(rank): seconds for rank, seconds in row["waits_for"].items()}
        return cls(**{**row, "waits_for": waits_for})


@dataclass(frozen=True)
class _Wait:
    rank: int
    phase: str
    start: float
    stop: float
    computes: bool


def attribute(tapes: Tapes) -> list[RankTimes]:
    """The parts of a step of every rank, in the order of the ranks."""
    shifts = _shifts(tapes)
    rank_times = [_read_tape(rank, row) for rank, row in enumerate(tapes)]
    sent, waited = _sent(tapes, shifts), _Waited(len(tapes))
    for (group, number), waits in _exchanges(tapes, shifts).items():
        if group.startswith("message "):
            _, channel, source, to = group.split()
            came = sent.get((int(channel), int(source), int(to), number), waits[0].start)
            waited.note(waits[0], waits[0].start, came, int(source))
        elif any(wait.computes for wait in waits):
            _with_compute(waits, tapes, rank_times, waited)
        else:
            _split(waits, waited)
    waited.blame(rank_times)
    for times, row in zip(rank_times, tapes, strict=True):
        times.hidden += _hidden_seconds(
            row["tape"]["transfers"], [(w[3], w[4]) for w in row["tape"]["waits"]]
        )
        _per_step(times, row["steps"])
        inside = sum(times.wire.get(phase, 0.0) for phase in ("backward", "exchange"))
        times.hidden = max(times.hidden, row["alone"] - inside, 0.0) if row["alone"] else times.hidden
    return rank_times


def slowest(rank_times: Sequence[RankTimes]) -> tuple[RankTimes, float, str] | None:
    """The rank for which the others wait the longest, the seconds of a step that each of them does on average, and the
    part in which it takes more time than they do. None if nobody waits for anybody."""
    if len(rank_times) < 2:
        return None
    waited = [sum(other.waits_for.get(late.rank, 0.0) for other in rank_times) for late in rank_times]
    most = max(waited)
    if most <= 0:
        return None
    late = rank_times[waited.index(most)]
    on_time = [other for other in rank_times if other is not late]
    more = {
        component: getattr(late, component) - median(getattr(other, component) for other in on_time)
        for component in WORK_COMPONENTS
    }
    return late, most / len(on_time), max(more, key=lambda component: more[component])


def _read_tape(rank: int, row: Mapping[str, Any]) -> RankTimes:
    tape = row["tape"]
    times = RankTimes(rank=rank, host=row["host"], step=row["seconds"], busy=row["busy"])
    times.workers_busy = row["workers_busy"]
    for phase, activity, seconds in tape["own"]:
        name = COMPONENT_OF_PHASE.get(phase)
        if name == "exchange":  # packing, comparing: nobody has to be waited for
            times.exchange += seconds
            times.wire["exchange"] = times.wire.get("exchange", 0.0) + seconds
        elif name is not None:
            setattr(times, name, getattr(times, name) + seconds)
        if name == "callbacks":
            called = activity or phase
            times.works[called] = times.works.get(called, 0.0) + seconds
    read = times.data
    times.reading_on_core = min(1.0, tape["cpu"].get("data", 0.0) / read) if read > 0 else 1.0
    return times


def _shifts(tapes: Tapes) -> list[float]:
    """What to add to each rank's times to have them by the first one's clock. Ranks of one machine share a clock."""
    first = tapes[0]
    return [0.0 if row["host"] == first["host"] else first["zero"] - row["zero"] for row in tapes]


def _exchanges(tapes: Tapes, shifts: Sequence[float]) -> dict[tuple[str, int], list[_Wait]]:
    """Each exchange with the ranks that waited in it; a message has one, and its source's number in its name."""
    waits_by_exchange: dict[tuple[str, int], list[_Wait]] = defaultdict(list)
    for rank, (row, shift) in enumerate(zip(tapes, shifts, strict=True)):
        for group, number, phase, start, stop, computes in row["tape"]["waits"]:
            name = f"{group} {rank}" if group.startswith("message ") else group
            waits_by_exchange[name, number].append(_Wait(rank, phase, start + shift, stop + shift, computes))
    return waits_by_exchange


def _sent(tapes: Tapes, shifts: Sequence[float]) -> dict[tuple[int, int, int, int], float]:
    """When each message was sent, by (group, source, destination, number)."""
    return {
        (group, source, to, number): when + shift
        for source, (row, shift) in enumerate(zip(tapes, shifts, strict=True))
        for group, to, number, when in row["tape"]["sends"]
    }


@dataclass(frozen=True, order=True)
class _Piece:
    """A stretch of a wait: for the rank `late` to come, or for the wire (-1)."""

    start: float
    stop: float
    late: int
    phase: str


class _Waited:
    """What each rank waited for, and when; `blame` makes parts of it."""

    def __init__(self, ranks: int):
        self.pieces_by_rank: list[list[_Piece]] = [[] for _ in range(ranks)]
        self.exchanges = [0] * ranks

    def note(self, wait: _Wait, since: float, last: float, culprit: int) -> None:
        """A wait from `since` on, for the rank `culprit` until it came, at `last`, and then for the wire."""
        came = since if culprit == wait.rank else min(max(last, since), wait.stop)
        pieces = _Piece(since, came, culprit, wait.phase), _Piece(came, wait.stop, _WIRE, wait.phase)
        self.pieces_by_rank[wait.rank] += [piece for piece in pieces if piece.stop > piece.start]
        self.exchanges[wait.rank] += 1

    def blame(self, rank_times: Sequence[RankTimes]) -> None:
        """Adds every wait to what it was for in the end."""
        for pieces in self.pieces_by_rank:
            pieces.sort()
        for times, pieces, count in zip(rank_times, self.pieces_by_rank, self.exchanges, strict=True):
            times.exchanges += count
            for piece in pieces:
                for seconds, culprit in self._causes(piece, piece.start, piece.stop, {times.rank}):
                    if culprit == _WIRE:
                        times.exchange += seconds
                        times.wire[piece.phase] = times.wire.get(piece.phase, 0.0) + seconds
                    else:
                        times.waiting += seconds
                        times.waits_for[culprit] = times.waits_for.get(culprit, 0.0) + seconds

    def _causes(
        self, piece: _Piece, start: float, stop: float, visited: AbstractSet[int]
    ) -> Iterator[tuple[float, int]]:
        """The seconds between `start` and `stop`, each with the rank that worked then, or the wire."""
        if piece.late == _WIRE or piece.late in visited:
            yield stop - start, _WIRE
            return
        late_pieces, now = self.pieces_by_rank[piece.late], start
        for other in late_pieces[
            max(0, bisect_left(late_pieces, start, key=lambda late_piece: late_piece.start) - 1) :
        ]:
            if other.start >= stop:
                break
            began, ended = max(other.start, now), min(other.stop, stop)
            if ended > began:
                yield began - now, piece.late
                yield from self._causes(other, began, ended, visited | {piece.late})
                now = ended
        yield stop - now, piece.late


def _split(waits: Sequence[_Wait], waited: _Waited) -> None:
    last = max(waits, key=lambda wait: wait.start)
    for wait in waits:
        waited.note(wait, wait.start, last.start, last.rank)


def _with_compute(
    waits: Sequence[_Wait], tapes: Tapes, rank_times: Sequence[RankTimes], waited: _Waited
) -> None:
    """Of a backward that exchanges: each rank computes, waits for the last to have computed, and for the wire.

    How long a rank computes is measured (`bare`), or follows from what is: the exchange alone takes `alone`, and all
    end together. Backward takes each rank so many times its forward, the same number of times on all of them: as large
    a number as the rank that is last can have.
    """
    end = max(wait.stop for wait in waits)
    bare = [tapes[wait.rank]["bare"] for wait in waits]
    if any(seconds is None for seconds in bare):
        forwards = [max(rank_times[wait.rank].forward / tapes[wait.rank]["steps"], 1e-9) for wait in waits]
        room = [end - tapes[wait.rank]["alone"] - wait.start for wait in waits]
        times = max(0.0, min(left / forward for left, forward in zip(room, forwards, strict=True)))
        bare = [times * forward for forward in forwards]
    ready = [min(wait.start + seconds, wait.stop) for wait, seconds in zip(waits, bare, strict=True)]
    last = waits[ready.index(max(ready))]
    for wait, when in zip(waits, ready, strict=True):
        rank_times[wait.rank].backward += when - wait.start
        waited.note(wait, when, max(ready), last.rank)


def _hidden_seconds(transfers: Iterable[Sequence[float]], waits: Sequence[Sequence[float]]) -> float:
    """Seconds in which something was carried and the rank did not wait."""
    edges = [(start, 1, 0) for start, _ in transfers] + [(stop, -1, 0) for _, stop in transfers]
    edges += [(start, 0, 1) for start, _ in waits] + [(stop, 0, -1) for _, stop in waits]
    carried = waiting = 0
    total, before = 0.0, 0.0
    for when, of_transfer, of_wait in sorted(edges):
        if carried > 0 and waiting == 0:
            total += when - before
        carried, waiting, before = carried + of_transfer, waiting + of_wait, when
    return total


def _per_step(times: RankTimes, steps: int) -> None:
    for name in (
        "step",
        *WORK_COMPONENTS,
        "exchange",
        "hidden",
        "waiting",
        "exchanges",
        "busy",
        "workers_busy",
    ):
        setattr(times, name, getattr(times, name) / steps)
    times.waits_for = {rank: seconds / steps for rank, seconds in times.waits_for.items()}
    times.wire = {phase: seconds / steps for phase, seconds in times.wire.items()}
    times.works = {called: seconds / steps for called, seconds in times.works.items()}
