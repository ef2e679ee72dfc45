"""Tries the first layouts of a plan on the ranks of this machine (`paddle-dp plan --try`), and says who was right.

Each layout trains the recipe for some steps, in rounds that go through all of them. Nothing is kept.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite
from pathlib import Path
from textwrap import wrap
from typing import Any

from paddle_dp.doctor.bench import Bench, bench_for
from paddle_dp.doctor.probe_rank import TRIAL_STEPS, WINDOW, WINDOWS
from paddle_dp.doctor.prove_rank import processor
from paddle_dp.errors import UsageError
from paddle_dp.launch.machine import Machine
from paddle_dp.plan.error_bars import TIE
from paddle_dp.plan.probe import Probe
from paddle_dp.plan.ranking import PlannedLayout
from paddle_dp.recipe import read_recipe
from paddle_dp.recipe.write import write_recipe
from paddle_dp.text import digits, duration, plural
from paddle_dp.verbs.layout_plan import RecipePlan, layout_settings
from paddle_dp.verbs.plan_screen import aligned, bar_text, described

ROUNDS = 2
MINUTES = 60.0
SPARE = 0.5  # further processes that delay no rank
# A few steps are no training: a constant rate needs no warm-up, and nothing is evaluated, saved or shown.
CONSTANT_RATE = "schedule={use: constant, learning_rate: 1.0e-6}"
SHORT = (CONSTANT_RATE, "callbacks=[]", "train.batch_ramp=null", f"train.length={TRIAL_STEPS} steps")


@dataclass(frozen=True, kw_only=True)
class TriedLayout:
    """A layout of the plan, and the measured seconds of a step: the median of all windows, the fastest, the slowest."""

    planned: PlannedLayout
    seconds: float
    low: float
    high: float

    @property
    def is_within(self) -> bool:
        """Whether the median is within the forecast's bar."""
        return self.planned.low <= self.seconds <= self.planned.high


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The tried layouts, in the plan's order; `load`: processes that wanted a processor in the minute before; `cores`
    of this machine for the ranks and them."""

    tried: Sequence[TriedLayout]
    load: float
    cores: int

    def sentences(self) -> Iterator[str]:
        """Yields verdicts: on the bars, on the order of layouts that are foretold apart, on the plan's first."""
        within = sum(each.is_within for each in self.tried)
        yield f"{within} of {len(self.tried)} within their bars, which should hold 8 of 10"
        yield from self._order()
        yield from self._first()
        ranks = self.tried[0].planned.choice.degrees.ranks
        if ranks + self.load > self.cores + SPARE:
            yield (
                f"not to be trusted: while {plural(ranks, 'rank')} trained, {digits(self.load)} other processes wanted "
                f"the {plural(self.cores, 'processor')} of this machine; try again when it is idle"
            )

    def _order(self) -> Iterator[str]:
        every_pair = combinations(self.tried, 2)
        foretold = [pair for pair in every_pair if pair[1].planned.seconds >= TIE * pair[0].planned.seconds]
        wrong = [(fast, slow) for fast, slow in foretold if fast.seconds > slow.seconds]
        if len(self.tried) == 1:
            yield "no order was foretold: there is one layout"
        elif not foretold:
            yield f"no order was foretold: they are within {100 * (TIE - 1):.0f} % of each other"
        elif not wrong:
            yield f"the order held in {plural(len(foretold), 'pair')} foretold apart"
        for fast, slow in wrong:
            yield (
                f"the order did not hold: {fast.planned.choice} should take "
                f"{fast.planned.seconds / slow.planned.seconds:.2f} times the seconds of {slow.planned.choice}, and "
                f"took {fast.seconds / slow.seconds:.2f} times"
            )

    def _first(self) -> Iterator[str]:
        first, best = self.tried[0], min(self.tried, key=lambda each: each.seconds)
        share = f"{100 * (1 - best.seconds / first.seconds):.0f} % less than the plan's first, {first.planned.choice}"
        if len(self.tried) == 1:
            return
        if best is first:
            yield "the plan was right: its first layout was the fastest of these"
        elif first.low <= best.high:
            yield f"no difference is certain: {best.planned.choice} took {share}, but their windows overlap"
        else:
            yield f"the plan was wrong: {best.planned.choice} took {share}"


def check_trial(plan: RecipePlan, probe: Probe | None = None) -> None:
    """Raises UsageError unless this machine has the plan's ranks, on the kind of device that it is for; with a
    `probe`, unless it has the probe's processor."""
    ranks, device, here = plan.rankings[0].ranks, plan.planner.device, Machine.here()
    if probe is not None and probe.machine.get("processor") != processor():
        raise UsageError(
            f"--try: the probe is of {probe.machine.get('processor')}, and this machine has {processor()}: measure "
            "here: paddle-dp scale RECIPE --probe FILE."
        )
    name = f"--try runs {plural(ranks, 'rank')} on {device.name}"
    if not device.accelerator:
        if ranks > here.cores:
            raise UsageError(
                f"{name}, and this machine has {plural(here.cores, 'processor')}: ranks that share one have no time of "
                f"their own. Give --ranks {here.cores} or fewer."
            )
    elif len(here.devices) < ranks or here.kind == "cpu":
        count = plural(len(here.devices), "accelerator") if here.kind != "cpu" else "no accelerator"
        raise UsageError(
            f"{name}, and this machine has {count}: try it there, or plan for this machine: paddle-dp scale RECIPE "
            "--probe probe.json, and plan with --measured probe.json."
        )


def trial(plan: RecipePlan, file: Path, settings: Sequence[str], count: int) -> Trial:
    """Trains the first `count` layouts of the plan's only number of ranks for a few steps, in a temporary folder.
    Raises UsageError if the ranks are not here or nothing is ranked, JobError with the cause if a layout fails."""
    check_trial(plan)
    (ranking,) = plan.rankings
    rows = ranking.ranked[:count]
    if not rows:
        raise UsageError(f"--try {count}: no layout of {plural(ranking.ranks, 'rank')} is foretold and fits.")
    times: list[list[float]] = [[] for _ in rows]
    load = os.getloadavg()[0]
    device = "auto" if plan.planner.device.accelerator else "cpu"
    with bench_for(ranking.ranks, device, MINUTES) as bench:
        for _ in range(ROUNDS):
            for seconds, row in zip(times, rows, strict=True):
                layout = layout_settings(plan.recipe, row.choice)
                seconds += _measured(bench, file, [*settings, *layout, *SHORT, f"train.device={device}"], row)
    tried = [
        TriedLayout(planned=row, seconds=statistics.median(seconds), low=min(seconds), high=max(seconds))
        for row, seconds in zip(rows, times, strict=True)
    ]
    return Trial(tried=tried, load=load, cores=Machine.here().cores)


def _measured(bench: Bench, file: Path, settings: Sequence[str], row: PlannedLayout) -> list[float]:
    """Seconds of a step of one layout in one round, by window."""
    folder = Path(tempfile.mkdtemp(dir=bench.folder))
    recipe = folder / "recipe.yaml"
    write_recipe(read_recipe(file, [*settings, f"output_dir={json.dumps(str(folder / 'run'))}"]), recipe)
    report = bench.measured(f"--try: {described(row.choice)}", "trial", str(recipe))
    return [float(each) for each in report["seconds"]]


def trial_lines(trial: Trial) -> Iterator[str]:
    """Yields the forecasts with the measured times, whether the order held, and who was right; of 100 columns."""
    yield (
        f"tried here, {plural(ROUNDS * WINDOWS, 'window')} of {WINDOW} steps of each: the median, the fastest and the "
        "slowest"
    )
    rows = [("", "foretold", "8 of 10 within", "measured", "", "off", "")]
    for number, each in enumerate(trial.tried, 1):
        row, unit = each.planned, 1.0 if each.seconds >= 1 else 1e3
        rows.append((
            str(number), duration(row.seconds), bar_text(row), duration(each.seconds),
            f"{digits(unit * each.low)} … {digits(unit * each.high)}",
            f"{100 * (row.seconds / each.seconds - 1):+.0f} %", f"  {row.choice}",
        ))  # fmt: skip
    yield from aligned(rows)
    for sentence in trial.sentences():
        yield from wrap(sentence, 100, subsequent_indent="  ")


def trial_fields(trial: Trial) -> dict[str, Any]:
    """The trial as JSON: seconds foretold and measured, and the verdicts."""
    rows = [
        {
            "layout": str(each.planned.choice), "settings": each.planned.choice.settings(),
            "foretold": each.planned.seconds, "low": each.planned.low,
            "high": each.planned.high if isfinite(each.planned.high) else None,
            "measured": {"seconds": each.seconds, "low": each.low, "high": each.high}, "within": each.is_within,
        }
        for each in trial.tried
    ]  # fmt: skip
    return {"layouts": rows, "load": trial.load, "verdict": [*trial.sentences()]}
