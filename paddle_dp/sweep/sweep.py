"""Runs a sweep: keeps its slots busy, reads scores as they come, ends losers, goes on after a kill."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from paddle_dp.errors import StoppedError, UsageError
from paddle_dp.launch import console
from paddle_dp.launch.processes import Signals, recorded_signals
from paddle_dp.launch.steady import steady_screen
from paddle_dp.report.run_record import read_run
from paddle_dp.sweep.request import SweepPlan, SweepRequest, forget, open_folder, planned
from paddle_dp.sweep.search import WARM_UP, SweepSearch, TrialRecord
from paddle_dp.sweep.space import combinations, labels, shown
from paddle_dp.sweep.trial import (
    SCREENS,
    Evaluations,
    Executor,
    LocalExecutor,
    RunningTrial,
    best_of,
    folder_of,
    last_line,
)
from paddle_dp.text import duration, plural

STOPPED, USAGE = StoppedError.exit_status, UsageError.exit_status
_POLL = 0.2  # seconds
_MOST_CAUSE = 240  # characters of a failure in a trial's line; all of it is in its screen
_HOPELESS = 3  # trials that fail, and none before them succeeded: the sweep ends


@dataclass
class _Slot:
    """A trial that runs. `reason`: why it was asked to end, "pruned" or "interrupted"; else "".

    `last_samples`: where it was seen to lose; later evaluations come by chance, and would change later trials.
    """

    record: TrialRecord
    running: RunningTrial
    evaluations: Evaluations
    began: float
    reason: str = ""
    last_samples: float = math.inf

    def interrupt(self, at_once: bool = False) -> None:
        self.reason = self.reason or "interrupted"
        if at_once:
            self.running.kill()
        else:
            self.running.stop()


@dataclass
class Sweep:
    """A sweep at work."""

    plan: SweepPlan
    search: SweepSearch
    executor: Executor
    slots: dict[int, _Slot] = field(default_factory=dict)
    waiting: list[TrialRecord] = field(default_factory=list)
    hopeless: str = ""
    is_mistake: bool = False  # the first trial was refused, as each other would be

    def run(self, signals: Signals) -> None:
        """Trains until all trials have ended, a signal asks to stop, or nothing but failures came of it."""
        self.waiting = [record for record in self.search.records() if record.state == "open"]
        requests = 0
        while True:
            if signals.times > requests:
                requests = signals.times
                self._stop_all(at_once=requests > 1)
            if not signals.times and not self.hopeless:
                self._fill()
            if not self.slots:
                return
            for number, slot in list(self.slots.items()):
                self._look(number, slot)
            time.sleep(_POLL)

    def _stop_all(self, at_once: bool) -> None:
        if self.slots and not at_once:
            console.write(f"{plural(len(self.slots), 'trial')} in flight: saving, then the sweep ends.")
        for slot in self.slots.values():
            slot.interrupt(at_once)

    def _fill(self) -> None:
        request = self.plan.request
        for number in [slot for slot in range(request.jobs) if slot not in self.slots]:
            waiting = self.waiting.pop(0) if self.waiting else None
            record = self.search.repeat(waiting) if waiting else self.search.draw(request.trials)
            if record is None:
                return
            self._start(number, record)

    def _start(self, number: int, record: TrialRecord) -> None:
        run, screen = folder_of(self.plan.folder, record.number), screen_of(self.plan, record)
        arguments = self.plan.arguments(record)
        evaluations = Evaluations(run, self.plan.score)
        running = self.executor.start(arguments, number, screen)
        self.slots[number] = _Slot(record, running, evaluations, time.monotonic())
        if arguments[-1].startswith("--resume="):
            console.write(f"trial {record.number} goes on from its checkpoint")

    def _look(self, number: int, slot: _Slot) -> None:
        status = slot.running.poll()
        for samples, step, score in slot.evaluations.read(is_over=status is not None):
            if slot.reason:
                break
            warm = step >= WARM_UP * slot.evaluations.total_steps
            if self.search.report(slot.record.number, samples, score, warm):
                slot.reason, slot.last_samples = "pruned", samples
                if status is None:
                    slot.running.stop()
        if status is not None:
            del self.slots[number]
            self._end(slot, status)

    def _end(self, slot: _Slot, status: int) -> None:
        points = [point for point in slot.evaluations.points if point[0] <= slot.last_samples]
        record, best = slot.record, best_of(points, self.plan.smaller)
        if slot.reason == "interrupted" and status:
            return  # it is open, and goes on with --resume
        state = "pruned" if slot.reason == "pruned" else "stopped" if status == STOPPED else "done"
        cause = ""
        if best is None or (state != "pruned" and status not in (0, STOPPED)):
            state, cause = "failed", self._cause(record, status)
        facts = {"seconds": round(time.monotonic() - slot.began, 1), "status": status, "cause": cause}
        if best is not None:
            facts |= {"step": best[1], "last_step": points[-1][1]}
        self.search.tell(record.number, state, None if best is None or state == "failed" else best[0], facts)
        ended = next(r for r in self.search.records() if r.number == record.number)
        console.write(trial_line(self.plan, ended))
        self._judge(ended, status)

    def _cause(self, record: TrialRecord, status: int) -> str:
        if status in (0, STOPPED):
            return f"no evaluation has a finite {self.plan.score}"
        with suppress(UsageError):
            state, sentence = read_run(folder_of(self.plan.folder, record.number)).ending
            if state == "failed":
                return sentence
        return last_line(screen_of(self.plan, record)) or f"status {status}"

    def _judge(self, ended: TrialRecord, status: int) -> None:
        """Ends a sweep of which nothing but failures came: a usage error, or several trials in a row."""
        records = self.search.records()
        if any(record.state not in ("failed", "open") for record in records):
            return
        failures = sum(record.state == "failed" for record in records)
        if status == USAGE or failures >= _HOPELESS:
            screen = screen_of(self.plan, ended)
            self.hopeless = (
                f"{plural(failures, 'trial')} failed and none succeeded, so the sweep ends. What the last one printed "
                f"is in {screen}."
            )
            self.is_mistake = status == USAGE and not self.slots
            for slot in self.slots.values():
                slot.interrupt()


def screen_of(plan: SweepPlan, record: TrialRecord) -> Path:
    return plan.folder / SCREENS / f"trial-{record.number:03d}.txt"


def trial_line(plan: SweepPlan, record: TrialRecord) -> str:
    """A trial's settings and its result in one line."""
    pairs = zip(labels(plan.axes), record.settings, strict=True)
    settings = " ".join(f"{name}={shown(value)}" for name, value in pairs)
    return f"trial {record.number}  {settings}  {result(plan, record)}"


def result(plan: SweepPlan, record: TrialRecord) -> str:
    """ "acc1 0.9722 at step 230 (14 s)", and why a trial ended before its end."""
    facts = record.facts
    if record.state == "open":
        return "not finished"
    if record.score is None:
        cause = str(facts.get("cause", ""))
        return f"failed: {cause if len(cause) <= _MOST_CAUSE else cause[:_MOST_CAUSE] + '…'}"
    early = {"pruned": ", a loser, ended early", "stopped": ", stopped"}.get(record.state, "")
    return (
        f"{plan.score} {record.score:.4f} at step {facts.get('step')}{early} "
        f"({duration(facts.get('seconds', 0.0))})"
    )


@steady_screen()
def run(request: SweepRequest, make_executor: Callable[[SweepPlan], Executor] | None = None) -> int:
    """Runs a sweep, shows its results, and returns the exit status: 0; 1 if no trial has a score; 75 if it was asked
    to stop. `make_executor`: makes the one that starts trials on other machines. Raises UsageError as `planned` does,
    and if the folder has another sweep."""
    from paddle_dp.sweep.results import show

    environment = dict(os.environ)  # importing Paddle changes it
    plan = planned(request)
    here = LocalExecutor(environment=environment, threads=plan.threads, devices=plan.devices)
    executor = make_executor(plan) if make_executor else here
    open_folder(plan)
    search = SweepSearch(
        plan.folder, plan.axes, smaller=plan.smaller, seed=request.seed, method=request.search, pruner=request.prune
    )  # fmt: skip
    count = combinations(plan.axes)
    trials = request.trials if count is None else min(count, request.trials)
    console.write(
        f"{plural(trials, 'trial')}, {request.jobs} at a time, {plural(request.ranks, 'rank')} each · "
        f"{'smallest' if plan.smaller else 'largest'} {plan.score} · {plan.folder}"
    )
    sweep = Sweep(plan, search, executor)
    with recorded_signals() as signals:
        sweep.run(signals)
    records = search.records()
    show(plan, records)
    if signals.number:
        console.write("The sweep was stopped. The same command with --resume goes on with it.")
        return STOPPED
    if sweep.hopeless:
        console.write(sweep.hopeless)
    if sweep.is_mistake:  # the command will be typed differently, and the folder has nothing to go on from
        forget(plan)
    return 0 if any(record.score is not None for record in records) else 1
