"""What would make a step shorter, and by how much: each expectation is computed from the measured parts of a step.

The model: the ranks work side by side and meet in the exchange, so a step takes the longest rank's own time, and
behind it what all wait for the wire. A change takes something away from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paddle_dp.plan.step_parts import RankParts, slowest

MATTERS = 0.08  # of a step: what gains less is not worth a line
SHORT = 5e-3  # seconds of a step, below which handing a batch over from a worker takes what the worker saves


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the run beside its times. `cores`: processors of one machine; `local_ranks`: ranks on it;
    `degrees`: of the axes that are split; `free`, `peak`: bytes of a rank's memory; `sent`: bytes that a rank sends in
    a step, the mean of all; 0 where they are not counted. `servers`: so many of the first ranks are; `one_process`:
    several ranks take another strategy; `load`: processes that wanted to compute, on the first rank's machine."""

    batch: int
    micro_batches: int = 1
    num_workers: int = 0
    cores: int = 1
    local_ranks: int = 1
    degrees: dict[str, int]
    recompute: str = "none"
    device: str = "cpu"
    free: int = 0
    peak: int = 0
    sent: float = 0.0
    servers: int = 0
    one_process: bool = False
    load: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something to do, the reason, and `seconds`: how long the same samples would take then."""

    what: str
    why: str
    seconds: float
    setting: bool = True  # it is one, and no new hardware


def changes(parts: Sequence[RankParts], facts: Facts) -> list[Change]:
    """What gains at least 8 % of a step, the largest gain first; settings before hardware."""
    step = _step(parts)
    found = [
        change
        for rule in (
            _workers,
            _callbacks,
            _recompute,
            _bubble,
            _larger_batch,
            _fewer_ranks,
            _as_many_as_cores,
            _slow_rank,
            _more_ranks,
        )
        for change in rule(parts, facts)
        if change.seconds < (1 - MATTERS) * step
    ]
    return sorted(found, key=lambda change: (not change.setting, change.seconds))


def workers_that_would_do(parts: Sequence[RankParts], facts: Facts) -> tuple[int, float]:
    """How many data workers a rank needs so that no step waits for data, or so that all cores are busy, whichever comes
    first; and the seconds of a step with them.

    A batch takes one process `reading` seconds. n workers have one ready every reading / n seconds. On CPUs they share
    the cores with the ranks: reading and computing together take at least their CPU time over the cores.
    """
    one = max(parts, key=lambda part: part.data)
    without = _step(parts, lambda part: part.own - part.data)
    if facts.num_workers:
        # The workers of a rank that waits work without a pause: a batch in each step.
        reading, on_core = facts.num_workers * one.step, one.workers_busy
        computing = one.busy
    else:
        reading, on_core = one.data, one.data * one.reading_on_core
        computing = max(0.0, one.busy - on_core)
    cores = facts.cores / max(facts.local_ranks, 1)
    floor = max(without, (computing + on_core) / cores)
    needed = max(1, math.ceil(reading / floor - 0.05))  # a twentieth of a worker is within what was measured
    return needed, max(floor, reading / needed)


def _step(parts: Sequence[RankParts], own: Callable[[RankParts], float] = lambda part: part.own) -> float:
    """The step if each rank's own time were `own`: the longest one's, and what all wait for the wire."""
    return max(own(part) for part in parts) + _wire(parts)


def _wire(parts: Sequence[RankParts]) -> float:
    return max(0.0, max(part.step for part in parts) - max(part.own for part in parts))


def _workers(parts: Sequence[RankParts], facts: Facts) -> Iterator[Change]:
    needed, seconds = workers_that_would_do(parts, facts)
    read = max(part.data for part in parts)
    if needed == facts.num_workers or read < MATTERS * _step(parts) or _step(parts) < SHORT:
        return
    yield Change(
        what=f"loader.num_workers={needed}",
        why=f"{_ms(read)} of a step are spent waiting for data, with {facts.num_workers} workers a rank",
        seconds=seconds,
    )


def _callbacks(parts: Sequence[RankParts], facts: Facts) -> Iterator[Change]:
    costs = {name: max(part.works.get(name, 0.0) for part in parts) for one in parts for name in one.works}
    if not costs:
        return
    name = max(costs, key=lambda each: costs[each])
    yield Change(
        what=f"call {name} a tenth as often (its setting `every`)",
        why=f"it takes {_ms(costs[name])} of a step, in which nothing is learned",
        seconds=_step(parts, lambda part: part.own - 0.9 * part.works.get(name, 0.0)),
    )


def _recompute(parts: Sequence[RankParts], facts: Facts) -> Iterator[Change]:
    if facts.recompute not in ("none", "selective") and facts.free > facts.peak:
        every = int(next((word for word in facts.recompute.split() if word.isdigit()), "1"))
        yield Change(
            what="strategy.recompute=none",
            why=f"backward runs forwards again; a rank takes {_gb(facts.peak)}, and {_gb(facts.free)} are free",
            seconds=_step(parts, lambda part: part.own - part.forward / every),
        )


def _bubble(parts: Sequence[RankParts], facts: Facts) -> Iterator[Change]:
    """Stages idle for (p - 1) / m of the time in which they compute (Huang et al., arXiv:1811.06965)."""
    stages, cuts = facts.degrees.get("pipeline", 1), facts.micro_batches
    samples = facts.batch // math.prod(facts.degrees.get(axis, 1) for axis in ("data", "sharding"))
    if stages == 1 or 2 * cuts > samples:
        return
    computing = max(part.forward + part.backward for part in parts)
    shorter = (stages - 1) * computing / (2 * cuts)
    yield Change(
        what=f"train.micro_batches={2 * cuts}",
        why=f"{stages} stages wait for each other at both ends of a batch of {cuts} micro-batches",
        seconds=_step(parts) - min(shorter, min(part.waiting + part.exchange for part in parts) / 2),
    )


def _larger_batch(parts: Sequence[RankParts], facts: Facts) -> Iterator[Change]:
    """Twice the samples need the gradients' exchange and the update once: they take twice the rest."""
    wire = min(max(_of_parameters(part, facts) for part in parts), _wire(parts))
    once = wire + min(part.update for part in parts)
    if len(parts) > 1 and facts.degrees.get("pipeline", 1) == 1:
        yield Change(
            what=f"train.batch={2 * facts.batch}, with the learning rate that fits it",
            why=f"exchange and update take {_ms(once)} of a step, for any number of samples; the times are those of "
            f"{facts.batch} samples",
            seconds=_step(parts) - once / 2,
        )


def _of_parameters(part: RankParts, facts: Facts) -> float:
    """The wire's time for gradients and parameters, of which there are as many for any number of samples. Cut layers
    exchange activations, as many in forward as in backward; that is all they do in forward."""
    if facts.degrees.keys() & {"tensor", "sequence"}:
        return max(0.0, part.exchange - 2 * part.wire.get("forward", 0.0))
    return part.exchange


def _fewer_ranks(parts: Sequence[RankParts], facts: Facts) -> Iterator[Change]:
    """One rank computes what all compute, and exchanges nothing."""
    if len(parts) > 1 and facts.degrees.keys() <= {"data"}:
        one = sum(part.data + part.forward + part.backward for part in parts)
        yield Change(
            what="--ranks 1" + " strategy.use=single" * bool(facts.servers),
            why="the ranks' exchange takes longer than it saves",
            seconds=one + max(part.update + part.callbacks for part in parts),
        )


def _as_many_as_cores(parts: Sequence[RankParts], facts: Facts) -> Iterator[Change]:
    """Ranks that share cores take turns; as many as there are cores do the same work, without the turns."""
    if facts.servers:
        return
    if facts.device == "cpu" and facts.local_ranks > facts.cores and facts.degrees.keys() <= {"data"}:
        yield Change(
            what=f"--ranks {facts.cores}",
            why=f"{facts.local_ranks} ranks share {facts.cores} cores, and take turns",
            seconds=min(sum(part.busy for part in parts) / facts.cores, _step(parts)),
        )


def _slow_rank(parts: Sequence[RankParts], facts: Facts) -> Iterator[Change]:
    found = slowest(parts)
    if found is None or facts.degrees.get("pipeline", 1) > 1:
        return
    one, _, where = found
    usual = max(part.own for part in parts if part is not one)
    yield Change(
        what=f"mend what slows rank {one.rank} on {one.host} ({where})",
        why=f"its own work takes {_ms(one.own)} a step, that of the others at most {_ms(usual)}",
        seconds=_step(parts, lambda part: min(part.own, usual)),
        setting=False,
    )


def _more_ranks(parts: Sequence[RankParts], facts: Facts) -> Iterator[Change]:
    """Twice the ranks halve what each of them computes; the wire carries 2 (n - 1) / n of the gradients."""
    count = len(parts)
    computing = [part.forward + part.backward for part in parts]
    if min(computing) < 0.6 * _step(parts) or facts.batch < 2 * count or facts.degrees.get("pipeline", 1) > 1:
        return
    if facts.servers:  # whose links carry the more, the more workers there are
        return
    data = facts.degrees.get("data", 1)
    more = 1.0 if data == 1 else ((2 * data - 1) / (2 * data)) / ((data - 1) / data)
    wire = max(part.exchange for part in parts) * (more - 1)
    other = " strategy.use=data_parallel" if facts.one_process else ""
    yield Change(
        what=f"--ranks {2 * count}{other}, on further devices or machines",
        why="a step is forward and backward" + ("; the exchange comes on top" if count == 1 else ""),
        seconds=_step(parts, lambda part: part.own - (part.forward + part.backward + part.data) / 2) + wire,
        setting=False,
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _gb(size: int) -> str:
    return f"{size / 2**30:.1f} GB"
