"""The arithmetic and the table of recovery.py: what the ranks' logs say a failure cost.

Each rank of each system appends lines of JSON to a file. A rank that goes on from a checkpoint writes
`{"time", "rank", "pid", "from": step}`, and all updates after that step are void: they are made again. After each
update a rank writes `{"time", "began", "rank", "pid", "step", "samples": [...]}`, the indices of the samples that it
learned from in that update; `began` is the time of its forward. Times are seconds since 1970.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tools import tables

Line = Mapping[str, Any]
Samples = dict[int, Counter[int]]
"""By step, how often an update learned from a sample, all ranks together."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A SIGKILL at `time`. `kind`: "rank", "supervisor" or "node"; `ended`: the processes that it ends, some of them
    half a second later."""

    time: float
    kind: str
    ended: frozenset[int] = frozenset()


def append(folder: Path, rank: int, **fields: Any) -> None:
    """Adds a line of this process to the log of its rank."""
    line = {"time": time.time(), "rank": rank, "pid": os.getpid(), **fields}
    with (folder / f"rank-{rank}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def read_log(folder: Path) -> list[Line]:
    """The lines of all ranks' files, by time. The last line of a killed rank may be half a line: it is left out."""
    lines: list[Line] = []
    for path in folder.glob("*.jsonl"):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):
                lines.append(json.loads(text))
    return sorted(lines, key=lambda line: float(line["time"]))


def counting(log: Sequence[Line]) -> list[Line]:
    """The updates that count in the end, by step: those after whose step no later attempt went on."""
    kept: dict[tuple[int, int], Line] = {}
    for line in log:
        if "from" in line:
            kept = {key: value for key, value in kept.items() if key[0] <= line["from"]}
        else:
            kept[line["step"], line["rank"]] = line
    return [kept[key] for key in sorted(kept)]


def samples_by_step(updates: Iterable[Line]) -> Samples:
    samples: Samples = {}
    for line in updates:
        samples.setdefault(line["step"], Counter()).update(line["samples"])
    return samples


def lost_and_twice(samples: Samples, undisturbed: Samples, steps_per_epoch: int) -> tuple[int, int]:
    """The uses of samples that the undisturbed run has and this one lacks, and those that it has in addition.

    A sample that is learned from in another step of its epoch is neither.
    """

    def by_epoch(by_step: Samples) -> Counter[tuple[int, int]]:
        uses: Counter[tuple[int, int]] = Counter()
        for step, counts in by_step.items():
            for sample, count in counts.items():
                uses[(step - 1) // steps_per_epoch, sample] += count
        return uses

    expected, seen = by_epoch(undisturbed), by_epoch(samples)
    return (expected - seen).total(), (seen - expected).total()


def seconds_to_update(kill: Kill, log: Iterable[Line]) -> float | None:
    """From the kill to the end of the first update that began after it; None if there is none. Ranks that outlive their
    supervisor for a moment make updates that nothing goes on from."""
    updates = (line for line in log if "step" in line and line["pid"] not in kill.ended)
    ends = [line["time"] for line in updates if line["began"] >= kill.time]
    return min(ends) - kill.time if ends else None


def median_step(log: Iterable[Line]) -> float:
    """The median of the seconds from an update to the next one of the same process."""
    last: dict[int, Line] = {}
    gaps = []
    for line in log:
        if "step" not in line:
            continue
        before = last.get(line["pid"])
        if before is not None and line["step"] == before["step"] + 1:
            gaps.append(line["time"] - before["time"])
        last[line["pid"]] = line
    if not gaps:
        raise ValueError("no two updates follow one another: the run is too short")
    return statistics.median(gaps)


def distance(weights: Mapping[str, np.ndarray], undisturbed: Mapping[str, np.ndarray]) -> tuple[int, float]:
    """The number of weights with other bits, and the largest difference of a weight. Raises ValueError unless both
    have the same tensors."""
    if set(weights) != set(undisturbed) or any(weights[n].shape != undisturbed[n].shape for n in weights):
        raise ValueError(f"not the same weights: {sorted(weights)} and {sorted(undisturbed)}")
    other, largest = 0, 0.0
    for name, tensor in weights.items():
        reference = undisturbed[name]
        other += int((tensor.view(np.uint32) != reference.view(np.uint32)).sum())
        largest = max(largest, float(np.abs(tensor.astype(np.float64) - reference).max(initial=0.0)))
    return other, largest


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system under one schedule. `goodput` counts samples, `by_updates` updates, both in units of the system's
    median step without a failure; `waits`: seconds from each kill to the next update, by kind."""

    system: str
    every: float
    kills: int
    seconds: float
    goodput: float
    by_updates: float
    waits: Mapping[str, Sequence[float]] = field(default_factory=dict)
    lost: int
    twice: int
    other_weights: int
    largest: float

    COLUMNS: ClassVar = (
        "system", "a kill each", "kills", "seconds", "goodput", "by updates", "to the next update: median", "worst",
        "samples lost", "twice", "from the undisturbed weights",
    )  # fmt: skip

    def cells(self) -> list[str]:
        every = f"{self.every:g} s" if self.every else "–"
        waits = [seconds for kind in self.waits.values() for seconds in kind]
        middle, worst = (f"{f(waits):.1f} s" if waits else "–" for f in (statistics.median, max))
        if len(self.waits) > 1:
            medians = (f"{kind} {statistics.median(seconds):.1f}" for kind, seconds in self.waits.items())
            middle += f" ({', '.join(medians)})"
        apart = f"{self.largest:.1e}" if self.other_weights else "0 bits apart"
        return [
            self.system, every, str(self.kills), f"{self.seconds:.0f}", f"{self.goodput:.0%}", f"{self.by_updates:.0%}",
            middle, worst, str(self.lost), str(self.twice), apart,
        ]  # fmt: skip


def row(  # noqa: PLR0913 - the facts of one run
    system: str,
    every: float,
    log: Sequence[Line],
    kills: Sequence[Kill],
    undisturbed: Samples,
    steps_per_epoch: int,
    weights: tuple[int, float],
) -> Row:
    """The row of a run from its log. `weights`: the `distance` from the undisturbed run's."""
    updates = counting(log)
    samples = samples_by_step(updates)
    lost, twice = lost_and_twice(samples, undisturbed, steps_per_epoch)
    begin, end = min(line["began"] for line in log if "step" in line), max(line["time"] for line in updates)
    step, seconds = median_step(log), end - begin
    of_undisturbed = sum(s.total() for s in undisturbed.values()) / len(undisturbed)
    learned = sum(s.total() for s in samples.values())
    waits: dict[str, list[float]] = {}
    for kill in kills:
        wait = seconds_to_update(kill, log)
        if wait is not None:
            waits.setdefault(kill.kind, []).append(wait)
    return Row(
        system=system, every=every, kills=len(kills), seconds=seconds, waits=waits, lost=lost, twice=twice,
        goodput=learned / of_undisturbed * step / seconds, by_updates=len(samples) * step / seconds,
        other_weights=weights[0], largest=weights[1],
    )  # fmt: skip


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    return tables.table(Row.COLUMNS, (each.cells() for each in rows))
