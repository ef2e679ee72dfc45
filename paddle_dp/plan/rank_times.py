"""Splits each rank's step time into components, by arithmetic on the tapes that all ranks gathered.

A wait ends when all ranks have arrived and the bytes are received. Until the last rank arrives, the wait is for that
rank (`waiting`), afterwards for the wire (`exchange`). If that rank itself waited meanwhile, the wait counts for its
cause instead. Transfers while the rank did something else are `hidden`.
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
"""Per rank: `host`; `zero`: the time at which the first step began; `seconds` and `steps` measured; `tape`
(`mesh.heartbeat.Tape`); `alone`: seconds of a step's gradient exchange when nothing else is done, 0 if not measured;
`bare`: seconds of a step's backward without exchange, or None; `busy`: CPU seconds of the process, `workers_busy` of
its data workers."""

COMPONENT_OF_PHASE = {
    "data": "data", "forward": "forward", "backward": "backward", "exchange": "exchange", "update": "update",
    "evaluate": "callbacks", "checkpoint": "callbacks", "callbacks": "callbacks",
}  # fmt: skip
_WIRE = -1
WORK_COMPONENTS = ("data", "forward", "backward", "update", "callbacks")
_ADDED_UP = ("step", *WORK_COMPONENTS, "exchange", "hidden", "waiting", "exchanges", "busy", "workers_busy")


@dataclass(kw_only=True)
class RankTimes:
    """Seconds of one rank's step. `exchange`: waits for the wire; `waiting`: waits for later ranks, by rank in
    `waits_for`; `hidden`: transfers during its work, which are no part of `step`.

    `wire`: the exchange by phase; `exchanges`: their number per step. `works`: seconds of each callback.
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
        """Seconds of the rank's work, without waits."""
        return sum(getattr(self, component) for component in WORK_COMPONENTS)

    @property
    def other(self) -> float:
        """Seconds that no phase accounts for."""
        return max(0.0, self.step - self.work - self.exchange - self.waiting)

    def as_json(self) -> dict[str, Any]:
        """The fields for JSON, rounded to 0.1 µs."""
        return {
            name: {str(key): round(seconds, 7) for key, seconds in value.items()} if isinstance(value, dict)
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
    """The components of every rank's step, in rank order."""
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
            last = max(waits, key=lambda wait: wait.start)
            for wait in waits:
                waited.note(wait, wait.start, last.start, last.rank)
    waited.blame(rank_times)
    for times, row in zip(rank_times, tapes, strict=True):
        spans = [(wait[3], wait[4]) for wait in row["tape"]["waits"]]
        times.hidden += _hidden_seconds(row["tape"]["transfers"], spans)
        _per_step(times, row["steps"])
        inside = sum(times.wire.get(phase, 0.0) for phase in ("backward", "exchange"))
        times.hidden = max(times.hidden, row["alone"] - inside, 0.0) if row["alone"] else times.hidden
    return rank_times


def slowest(rank_times: Sequence[RankTimes]) -> tuple[RankTimes, float, str] | None:
    """The rank for which the others wait longest, the mean seconds per step of their waits, and the component in which
    it exceeds their median the most. None if no rank waits for another."""
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
        if name == "exchange":  # packing, comparing: no wait for another rank
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
    """Seconds to add to each rank's times to get the first rank's clock. Ranks of one machine share a clock."""
    first = tapes[0]
    return [0.0 if row["host"] == first["host"] else first["zero"] - row["zero"] for row in tapes]


def _exchanges(tapes: Tapes, shifts: Sequence[float]) -> dict[tuple[str, int], list[_Wait]]:
    """Each exchange with its waits; a message has one wait, and its name ends with source and destination."""
    waits_by_exchange: dict[tuple[str, int], list[_Wait]] = defaultdict(list)
    for rank, (row, shift) in enumerate(zip(tapes, shifts, strict=True)):
        for group, number, phase, start, stop, computes in row["tape"]["waits"]:
            name = f"{group} {rank}" if group.startswith("message ") else group
            waits_by_exchange[name, number].append(_Wait(rank, phase, start + shift, stop + shift, computes))
    return waits_by_exchange


def _sent(tapes: Tapes, shifts: Sequence[float]) -> dict[tuple[int, int, int, int], float]:
    """Send times of messages, by (group, source, destination, number)."""
    return {
        (group, source, to, number): when + shift
        for source, (row, shift) in enumerate(zip(tapes, shifts, strict=True))
        for group, to, number, when in row["tape"]["sends"]
    }


@dataclass(frozen=True, order=True)
class _Piece:
    """A piece of a wait: for the rank `late` to arrive, or for the wire (-1)."""

    start: float
    stop: float
    late: int
    phase: str


class _Waited:
    """The waits of each rank; `blame` adds them to its components."""

    def __init__(self, ranks: int):
        self.pieces_by_rank: list[list[_Piece]] = [[] for _ in range(ranks)]
        self.exchanges = [0] * ranks

    def note(self, wait: _Wait, since: float, last: float, culprit: int) -> None:
        """Adds a wait from `since` on: for the rank `culprit` until it arrived, at `last`, and then for the wire."""
        came = since if culprit == wait.rank else min(max(last, since), wait.stop)
        pieces = _Piece(since, came, culprit, wait.phase), _Piece(came, wait.stop, _WIRE, wait.phase)
        self.pieces_by_rank[wait.rank] += [piece for piece in pieces if piece.stop > piece.start]
        self.exchanges[wait.rank] += 1

    def blame(self, rank_times: Sequence[RankTimes]) -> None:
        """Adds every wait to its final cause."""
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
        """Splits `start` to `stop` into seconds, each with the rank that worked then, or the wire."""
        if piece.late == _WIRE or piece.late in visited:
            yield stop - start, _WIRE
            return
        late_pieces, now = self.pieces_by_rank[piece.late], start
        begun = bisect_left(late_pieces, start, key=lambda late_piece: late_piece.start)
        for other in late_pieces[max(0, begun - 1) :]:
            if other.start >= stop:
                break
            began, ended = max(other.start, now), min(other.stop, stop)
            if ended > began:
                yield began - now, piece.late
                yield from self._causes(other, began, ended, visited | {piece.late})
                now = ended
        yield stop - now, piece.late


def _with_compute(
    waits: Sequence[_Wait], tapes: Tapes, rank_times: Sequence[RankTimes], waited: _Waited
) -> None:
    """Splits a backward that exchanges: each rank computes, waits for the last rank's computing, then for the wire.

    `bare` is the measured time of computing. Without it, the exchange is taken to last `alone`, and backward to be the
    same multiple of forward on all ranks: the largest with which every rank ends in time.
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
    """Seconds of transfers during which the rank did not wait."""
    edges = [(start, 1, 0) for start, _ in transfers] + [(stop, -1, 0) for _, stop in transfers]
    edges += [(start, 0, 1) for start, _ in waits] + [(stop, 0, -1) for _, stop in waits]
    carried = waiting = 0
    total, before = 0.0, 0.0
    for when, transfer_change, wait_change in sorted(edges):
        if carried > 0 and waiting == 0:
            total += when - before
        carried, waiting, before = carried + transfer_change, waiting + wait_change, when
    return total


def _per_step(times: RankTimes, steps: int) -> None:
    for name in (*_ADDED_UP, "waits_for", "wire", "works"):
        total = getattr(times, name)
        is_table = isinstance(total, dict)
        setattr(times, name, {k: part / steps for k, part in total.items()} if is_table else total / steps)
