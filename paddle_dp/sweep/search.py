"""The search for settings: Optuna's study in the sweep's folder, its samplers, its pruner, and each trial's record.

Of the study this module uses Optuna's public interface alone. The settings of a trial depend on the seed, its number
and the results of trials before it, not on the process that draws them: a sweep that was killed draws the same.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages.journal import BaseJournalBackend, JournalStorage
from optuna.trial import TrialState

from paddle_dp.sweep.space import Axis, Settings, all_settings, combinations

STUDY = "optuna.journal"
SEARCHES = ("tpe", "random")
PRUNERS = ("median", "none")
FEWEST_TRIALS = 3  # that ran to their end before a loser is stopped
WARM_UP = 0.25  # of a trial's steps, in which it is not stopped
_RANDOM_TRIALS = 5  # before TPE draws from the results
_MOST_DRAWS = 50  # of a setting that no trial has had
_NUMBER, _SETTINGS, _FACTS = "number", "settings", "facts"  # attributes of Optuna's trials

optuna.logging.set_verbosity(optuna.logging.WARNING)


class _Journal(BaseJournalBackend):
    """Optuna's journal as lines of JSON, as its JournalFileBackend writes them, without a lock that a killed process
    would leave: the sweep's folder is locked. A line that was cut off by a crash is dropped."""

    def __init__(self, path: Path):
        self._path = path
        text = path.read_bytes() if path.exists() else b""
        self._lines = text.split(b"\n")[:-1]
        if not text.endswith(b"\n") and text:
            os.truncate(path, text.rfind(b"\n") + 1)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        return iter([json.loads(line) for line in self._lines[log_number_from:]])

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = [json.dumps(log, separators=(",", ":")).encode() for log in logs]
        with self._path.open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        self._lines += lines


class _Fixed(RandomSampler):
    """Draws the values that it was made with."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__()
        self.values = values

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self.values[param_name]


def _distribution(axis: Axis) -> BaseDistribution:
    if axis.choices:
        return CategoricalDistribution(axis.choices)
    if axis.integer:
        return IntDistribution(int(axis.low), int(axis.high), log=axis.log, step=axis.step)
    return FloatDistribution(axis.low, axis.high, log=axis.log)


@dataclass(frozen=True)
class TrialRecord:
    """A trial as the study remembers it. `state`: "open", "done", "pruned", "stopped" or "failed"; `score`: the best of
    its evaluations, or None; `curve`: the score at each number of samples; `facts`: further results."""

    number: int
    settings: Settings
    state: str = "open"
    score: float | None = None
    curve: Mapping[int, float] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class SweepSearch:
    """The study of a sweep. `axes`, `seed` and `method` must be those with which it began."""

    def __init__(
        self, folder: Path, axes: Sequence[Axis], *, smaller: bool, seed: int, method: str, pruner: str
    ):
        self.axes, self.seed, self.method = axes, seed, method
        self._distributions = {axis.key: _distribution(axis) for axis in axes}
        median = optuna.pruners.MedianPruner(n_startup_trials=FEWEST_TRIALS)
        self._study = optuna.create_study(
            storage=JournalStorage(_Journal(folder / STUDY)), study_name="sweep", load_if_exists=True,
            direction="minimize" if smaller else "maximize",
            pruner=median if pruner == "median" else optuna.pruners.NopPruner(),
        )  # fmt: skip
        self._trials: dict[int, optuna.Trial] = {}
        self._close_attempts()

    def _close_attempts(self) -> None:
        """Ends the attempts of a process that was killed; `repeat` begins those without a result anew."""
        for frozen in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            facts = frozen.user_attrs.get(_FACTS, {})
            self._end(frozen.number, facts.get("state", "open"), facts.get("score"))

    def records(self) -> list[TrialRecord]:
        """Every trial, by number; of several attempts at it the last."""
        latest = {}
        for frozen in self._study.get_trials(deepcopy=False):
            if (number := frozen.user_attrs.get(_NUMBER)) is not None:
                facts = frozen.user_attrs.get(_FACTS, {})
                settings, curve = tuple(frozen.user_attrs[_SETTINGS]), frozen.intermediate_values
                state, score = facts.get("state", "open"), facts.get("score")
                latest[number] = TrialRecord(number, settings, state, score, curve, facts)
        return [latest[number] for number in sorted(latest)]

    def draw(self, trials: int) -> TrialRecord | None:
        """Begins the next of so many trials, with settings that no trial before it has; None if there are no others.

        If all settings are no more than `trials`, each is drawn once, in order.
        """
        known = [record.settings for record in self.records()]
        number, count = len(known), combinations(self.axes)
        if number >= trials:
            return None
        for attempt in range(_MOST_DRAWS if count is None or count > trials else 0):
            trial, settings = self._sampled(number, attempt)
            if settings not in known:
                return self._begin(trial, number, settings)
            self._study.tell(trial, state=TrialState.FAIL)  # without a number, so it does not count
        untried = (s for s in all_settings(self.axes) if s not in known) if count is not None else iter(())
        rest = next(untried, None)
        return None if rest is None else self.repeat(TrialRecord(number=number, settings=rest))

    def repeat(self, record: TrialRecord) -> TrialRecord:
        """Begins an attempt at a trial, with its settings."""
        values = {
            axis.key: value if axis.choices else int(value) if axis.integer else float(value)
            for axis, value in zip(self.axes, record.settings, strict=True)
        }
        return self._begin(self._ask(_Fixed(values)), record.number, record.settings)

    def _sampled(self, number: int, attempt: int) -> tuple[optuna.Trial, Settings]:
        seed = random.Random(f"{self.seed}/{number}/{attempt}").getrandbits(32)
        by_results = TPESampler(seed=seed, n_startup_trials=_RANDOM_TRIALS)
        trial = self._ask(RandomSampler(seed=seed) if self.method == "random" else by_results)
        return trial, tuple(axis.written(trial.params[axis.key]) for axis in self.axes)

    def _ask(self, sampler: BaseSampler) -> optuna.Trial:
        self._study.sampler = sampler
        return self._study.ask(self._distributions)

    def _begin(self, trial: optuna.Trial, number: int, settings: Settings) -> TrialRecord:
        trial.set_user_attr(_SETTINGS, list(settings))
        trial.set_user_attr(_NUMBER, number)
        self._trials[number] = trial
        return TrialRecord(number=number, settings=settings)

    def report(self, number: int, samples: int, score: float, may_stop: bool) -> bool:
        """Notes a trial's score after so many samples, the first one there; returns whether it is a loser to stop."""
        trial = self._trials[number]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a resumed trial repeats positions
            trial.report(score, samples)
        return may_stop and trial.should_prune()

    def tell(self, number: int, state: str, score: float | None, facts: Mapping[str, Any]) -> None:
        """Ends a trial with its state, as a TrialRecord has it, and its score."""
        trial = self._trials.pop(number)
        trial.set_user_attr(_FACTS, {**facts, "state": state, "score": score})
        self._end(trial.number, state, score)

    def _end(self, optuna_number: int, state: str, score: float | None) -> None:
        if state == "done":
            self._study.tell(optuna_number, score)
        else:
            was_scored = state in ("pruned", "stopped")
            self._study.tell(optuna_number, state=TrialState.PRUNED if was_scored else TrialState.FAIL)
