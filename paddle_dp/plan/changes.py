"""Proposes changes that shorten a step, with gains computed from the measured parts of a step.

The model: ranks work in parallel and meet in the exchange. A step takes the longest rank's work, and then the wait of
all ranks for the wire. A change shortens one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paddle_dp.mesh.degrees import SAMPLE_AXES
from paddle_dp.plan.rank_times import RankTimes, slowest
from paddle_dp.text import duration, gigabytes

MATTERS = 0.08  # of a step; a smaller gain is not worth a line
SHORT = 5e-3  # seconds; in a shorter step, a batch from a worker takes the time that the worker saves


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts of a run in addition to its times.

    `cores`: processors of one machine; `local_ranks`: ranks on it; `degrees`: of the axes that are split; `free`,
    `peak`: bytes of a rank's memory; `sent`: bytes that a rank sends in a step, the mean over ranks (0: not counted);
    `servers`: the first ranks are so many servers; `one_process`: more ranks need another strategy; `load`: processes
    that wanted to compute on the first rank's machine.
    """

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

    @property
    def all_read(self) -> bool:
        """Whether every rank reads samples and computes."""
        return not self.servers

    @property
    def alike(self) -> bool:
        """Whether all ranks do the same work, on other samples or slices."""
        return self.degrees.get("pipeline", 1) == 1 and self.all_read


@dataclass(frozen=True, kw_only=True)
class TuningAdvice:
    """A change, its reason, and `seconds`: the time that the same samples would then take."""

    what: str
    why: str
    seconds: float
    setting: bool = True  # a setting, not new hardware


def changes(rank_times: Sequence[RankTimes], facts: Facts) -> list[TuningAdvice]:
    """Changes that gain at least 8 % of a step: settings before hardware, then the largest gain first."""
    step = _step(rank_times)
    proposals = [change for rule in RULES for change in rule(rank_times, facts)]
    worthwhile = [change for change in proposals if change.seconds < (1 - MATTERS) * step]
    return sorted(worthwhile, key=lambda change: (not change.setting, change.seconds))


def workers_that_would_do(rank_times: Sequence[RankTimes], facts: Facts) -> tuple[int, float]:
    """The smallest number of data workers per rank with which no step waits for data, or all cores are busy; and the
    seconds of a step with them.

    One process reads a batch in `reading` seconds, so n workers deliver one every reading / n seconds. They share the
    cores with the ranks: reading and computing together take at least their CPU time divided by the cores.
    """
    reader = max(rank_times, key=lambda times: times.data)
    without = _step(rank_times, lambda times: times.work - times.data)
    if facts.num_workers:
        # The workers of a rank that waits for data never pause: together they read one batch per step.
        reading, on_core = facts.num_workers * reader.step, reader.workers_busy
        computing = reader.busy
    else:
        reading, on_core = reader.data, reader.data * reader.reading_on_core
        computing = max(0.0, reader.busy - on_core)
    cores = facts.cores / max(facts.local_ranks, 1)
    floor = max(without, (computing + on_core) / cores)
    needed = max(1, math.ceil(reading / floor - 0.05))  # 0.05 of a worker is within the measurement's noise
    return needed, max(floor, reading / needed)


def _step(
    rank_times: Sequence[RankTimes], work: Callable[[RankTimes], float] = lambda times: times.work
) -> float:
    """Seconds of a step with this `work` per rank: the longest one, and the common wait for the wire."""
    return max(work(times) for times in rank_times) + _wire(rank_times)


def _wire(rank_times: Sequence[RankTimes]) -> float:
    return max(0.0, max(times.step for times in rank_times) - max(times.work for times in rank_times))


def _workers(rank_times: Sequence[RankTimes], facts: Facts) -> Iterator[TuningAdvice]:
    needed, seconds = workers_that_would_do(rank_times, facts)
    read = max(times.data for times in rank_times)
    if needed == facts.num_workers or read < MATTERS * _step(rank_times) or _step(rank_times) < SHORT:
        return
    yield TuningAdvice(
        what=f"loader.num_workers={needed}",
        why=f"{duration(read)} of a step are spent waiting for data, with {facts.num_workers} workers a rank",
        seconds=seconds,
    )


def _callbacks(rank_times: Sequence[RankTimes], facts: Facts) -> Iterator[TuningAdvice]:
    names = dict.fromkeys(name for times in rank_times for name in times.works)
    costs = {name: max(times.works.get(name, 0.0) for times in rank_times) for name in names}
    if not costs:
        return
    name = max(costs, key=lambda each: costs[each])
    yield TuningAdvice(
        what=f"call {name} a tenth as often (its setting `every`)",
        why=f"it takes {duration(costs[name])} of a step, in which nothing is learned",
        seconds=_step(rank_times, lambda times: times.work - 0.9 * times.works.get(name, 0.0)),
    )


def _recompute(rank_times: Sequence[RankTimes], facts: Facts) -> Iterator[TuningAdvice]:
    if facts.recompute not in ("none", "selective") and facts.free > facts.peak:
        every = int(next((token for token in facts.recompute.split() if token.isdigit()), "1"))
        yield TuningAdvice(
            what="strategy.recompute=none",
            why=f"backward runs forwards again; a rank takes {gigabytes(facts.peak)}, and {gigabytes(facts.free)} are "
            "free",
            seconds=_step(rank_times, lambda times: times.work - times.forward / every),
        )


def _bubble(rank_times: Sequence[RankTimes], facts: Facts) -> Iterator[TuningAdvice]:
    """Stages idle for (p - 1) / m of the time in which they compute (Huang et al., arXiv:1811.06965)."""
    stages, cuts = facts.degrees.get("pipeline", 1), facts.micro_batches
    samples = facts.batch // math.prod(facts.degrees.get(axis, 1) for axis in SAMPLE_AXES)
    if stages == 1 or 2 * cuts > samples:
        return
    computing = max(times.forward + times.backward for times in rank_times)
    shorter = (stages - 1) * computing / (2 * cuts)
    yield TuningAdvice(
        what=f"train.micro_batches={2 * cuts}",
        why=f"{stages} stages wait for each other at both ends of a batch of {cuts} micro-batches",
        seconds=_step(rank_times)
        - min(shorter, min(times.waiting + times.exchange for times in rank_times) / 2),
    )


def _larger_batch(rank_times: Sequence[RankTimes], facts: Facts) -> Iterator[TuningAdvice]:
    """Twice the samples need one exchange and one update; all other times double."""
    wire = min(max(_parameter_wire_time(times, facts) for times in rank_times), _wire(rank_times))
    once = wire + min(times.update for times in rank_times)
    if len(rank_times) > 1 and facts.degrees.get("pipeline", 1) == 1:
        yield TuningAdvice(
            what=f"train.batch={2 * facts.batch}, with the learning rate that fits it",
            why=f"exchange and update take {duration(once)} of a step, for any number of samples; the times are for "
            f"{facts.batch} samples",
            seconds=_step(rank_times) - once / 2,
        )


def _parameter_wire_time(times: RankTimes, facts: Facts) -> float:
    """The wire's time for gradients and parameters, which does not depend on the number of samples.

    Cut layers exchange as many activations in backward as in forward, and nothing else in forward: twice the exchange
    of forward is subtracted.
    """
    if facts.degrees.keys() & {"tensor", "sequence"}:
        return max(0.0, times.exchange - 2 * times.wire.get("forward", 0.0))
    return times.exchange


def _fewer_ranks(rank_times: Sequence[RankTimes], facts: Facts) -> Iterator[TuningAdvice]:
    """One rank does the computing of all, and exchanges nothing."""
    if len(rank_times) > 1 and facts.degrees.keys() <= {"data"}:
        computing = sum(times.data + times.forward + times.backward for times in rank_times)
        yield TuningAdvice(
            what="--ranks 1" + " strategy.use=single" * (not facts.alike),
            why="the ranks' exchange takes longer than it saves",
            seconds=computing + max(times.update + times.callbacks for times in rank_times),
        )


def _rank_per_core(rank_times: Sequence[RankTimes], facts: Facts) -> Iterator[TuningAdvice]:
    """Ranks that share cores take turns; one rank per core does the same work without."""
    crowded = facts.device == "cpu" and facts.local_ranks > facts.cores
    if crowded and facts.alike and facts.degrees.keys() <= {"data"}:
        yield TuningAdvice(
            what=f"--ranks {facts.cores}",
            why=f"{facts.local_ranks} ranks share {facts.cores} cores, and take turns",
            seconds=min(sum(times.busy for times in rank_times) / facts.cores, _step(rank_times)),
        )


def _slow_rank(rank_times: Sequence[RankTimes], facts: Facts) -> Iterator[TuningAdvice]:
    outlier = slowest(rank_times)
    if outlier is None or facts.degrees.get("pipeline", 1) > 1:
        return
    late, _, component = outlier
    usual = max(times.work for times in rank_times if times is not late)
    yield TuningAdvice(
        what=f"speed up rank {late.rank} on {late.host} ({component})",
        why=f"its own work takes {duration(late.work)} a step, the others' at most {duration(usual)}",
        seconds=_step(rank_times, lambda times: min(times.work, usual)),
        setting=False,
    )


def _more_ranks(rank_times: Sequence[RankTimes], facts: Facts) -> Iterator[TuningAdvice]:
    """Twice the ranks halve the computing of each; the wire carries 2 (n - 1) / n of the gradients."""
    count = len(rank_times)
    computing = [times.forward + times.backward for times in rank_times]
    if not facts.alike or min(computing) < 0.6 * _step(rank_times) or facts.batch < 2 * count:
        return
    data = facts.degrees.get("data", 1)
    more = 1.0 if data == 1 else ((2 * data - 1) / (2 * data)) / ((data - 1) / data)
    wire = max(times.exchange for times in rank_times) * (more - 1)
    other = " strategy.use=data_parallel" if facts.one_process else ""

    def halved(times: RankTimes) -> float:
        return times.work - (times.forward + times.backward + times.data) / 2

    yield TuningAdvice(
        what=f"--ranks {2 * count}{other}, on further devices or machines",
        why="a step is forward and backward" + ("; the exchange comes on top" if count == 1 else ""),
        seconds=_step(rank_times, halved) + wire,
        setting=False,
    )


RULES = (
    _workers, _callbacks, _recompute, _bubble, _larger_batch, _fewer_ranks, _rank_per_core, _slow_rank, _more_ranks,
)  # fmt: skip
