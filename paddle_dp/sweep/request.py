"""The request of a sweep, checked before the first trial: axes, score, devices, every setting, and its folder."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from paddle_dp.errors import Mistake, RecipeError, UsageError, did_you_mean
from paddle_dp.files import replacing
from paddle_dp.launch.batch_numbers import batch_numbers
from paddle_dp.launch.command import Job, typed
from paddle_dp.launch.machine import Machine, cores, spoken
from paddle_dp.launch.memory import refuse_memory
from paddle_dp.launch.plan import recipe_plan
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.recipe.folder import claim
from paddle_dp.scores import smaller_is_better
from paddle_dp.sweep.search import PRUNERS, SEARCHES, STUDY, TrialRecord
from paddle_dp.sweep.space import Axis, Settings, all_settings, combinations, overrides, read_axes, set_keys
from paddle_dp.sweep.trial import folder_of, resume_point

REQUEST = "sweep.json"
_MOST_CHECKED = 256  # combinations of settings that are read before the first trial
_NEEDED = {"metrics": "writes", "evaluate": "makes", "checkpoint": "keeps the best of"}
_MAY_CHANGE = ("trials",)  # when a sweep goes on
_RESERVED = {
    "name": "each trial has a folder in --output-dir",
    "output_dir": "each trial has a folder in --output-dir",
    "callbacks.checkpoint.best": "it is --score NAME",
}


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """A recipe, its axes and settings, and how they are searched. `texts`: axes and settings as they were typed.

    `ranks`: of each trial, `jobs` the trials at a time. `score` is "" for the recipe's `best`. `elsewhere`: trials
    train on other machines, whose devices are not this one's.
    """

    recipe: Path
    texts: tuple[str, ...]
    folder: Path | None = None
    trials: int = 20
    jobs: int = 1
    ranks: int = 1
    score: str = ""
    seed: int = 0
    search: str = "tpe"
    prune: str = "median"
    resume: bool = False
    elsewhere: bool = False

    def __post_init__(self) -> None:
        for option, number, least in (
            ("--trials", self.trials, 1), ("--jobs", self.jobs, 1), ("--ranks", self.ranks, 1),
            ("--seed", self.seed, 0),
        ):  # fmt: skip
            if number < least:
                raise UsageError(f"{option} {number}: give {least} or more.")
        for option, word, known in (("--search", self.search, SEARCHES), ("--prune", self.prune, PRUNERS)):
            if word not in known:
                raise UsageError(f"{option} {word}: there is no such.{did_you_mean(word, known, 'It takes')}")


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A request that was checked: its axes, the settings of all trials, the score and the sweep's folder.

    `device`: the recipe's train.device. `accelerators`: of each trial, if any. `devices`: of each slot on this machine.
    """

    request: SweepRequest
    axes: tuple[Axis, ...]
    settings: tuple[str, ...]
    score: str
    folder: Path
    threads: int
    device: str
    accelerators: int
    devices: tuple[tuple[str, ...], ...] = ()

    @property
    def smaller(self) -> bool:
        return smaller_is_better(self.score)

    def arguments(self, record: TrialRecord) -> list[str]:
        """The arguments of `paddle-dp` that train a trial; that go on with it if it has a checkpoint."""
        run = folder_of(self.folder, record.number)
        words = ["train", typed(self.request.recipe), *self.settings, *overrides(self.axes, record.settings)]
        words += ["--ranks", str(self.request.ranks), "--output-dir", str(run)]
        step = resume_point(run)
        return words if step is None else [*words, f"--resume={step}"]


def planned(request: SweepRequest) -> SweepPlan:
    """Checks a request.

    Raises RecipeError for mistakes in the recipe or in a setting of an axis, and UsageError for a sweep that cannot be
    carried out: no score, too few devices, a callback that is missing.
    """
    axes, settings = read_axes(request.texts)
    if key := next((key for key in set_keys(axes, settings) if key in _RESERVED), None):
        raise UsageError(f"{key} cannot be set in a sweep: {_RESERVED[key]}.")
    first = tuple(axis.samples[0] for axis in axes)
    recipe = _read(request, axes, settings, first)
    score = request.score or _best_of(recipe)
    settings = (*settings, *_for_score(recipe, score))
    machine = Machine.here()
    kinds = _kinds(request, recipe, settings, machine)
    numbers = set[int]()
    for chosen in _samples(axes):
        read = _read(request, axes, settings, chosen)
        strategy = read.strategy.config
        numbers.add((request.ranks - strategy.servers) * strategy.accelerators)
        errors = [_usage_error(read, request.ranks, kind) for kind in kinds]
        if all(errors):
            raise UsageError(f"{' '.join(overrides(axes, chosen))}: {errors[0]}")
    folder = request.folder or recipe.folder.with_name(f"{recipe.folder.name}.sweep")
    devices = () if request.elsewhere or kinds == ("cpu",) else _devices(request, machine, numbers)
    threads = max(1, cores() // (request.jobs * request.ranks))
    return SweepPlan(
        request=request, axes=axes, settings=settings, score=score, folder=folder, threads=threads,
        device=recipe.train.device, accelerators=max(numbers), devices=devices,
    )  # fmt: skip


def _kinds(request: SweepRequest, recipe: Recipe, settings: Settings, machine: Machine) -> tuple[str, ...]:
    """The kinds of devices on which a trial may train. Raises UsageError if a trial here lacks some."""
    device = recipe.train.device
    if request.elsewhere:  # the cluster's machines are not known yet
        return ("gpu", "cpu") if device == "auto" else (device,)
    job = Job(recipe=request.recipe, overrides=settings, ranks=request.ranks)
    return (recipe_plan(job, machine, recipe).kind,)


def _usage_error(recipe: Recipe, ranks: int, kind: str) -> UsageError | None:
    try:
        for component in (recipe.strategy, *recipe.callbacks):
            component.refuse(recipe, ranks, kind)
        refuse_memory(recipe, 0, 1, "Leave it out: the trials of a sweep do not restart.")
    except UsageError as error:
        return error
    return None


def _read(request: SweepRequest, axes: Sequence[Axis], settings: Settings, chosen: Settings) -> Recipe:
    """The recipe with one setting of each axis; a mistake in an element of a list says how to give a list."""
    texts = (*settings, *overrides(axes, chosen))
    # Trials at the same time share the memory, and other machines have theirs: `auto` needs an amount.
    kind = "gpu" if request.elsewhere else Machine.here().kind if request.jobs > 1 else ""
    try:
        numbers = batch_numbers(request.recipe, texts, request.ranks, kind=kind)
        return read_recipe(request.recipe, (*texts, *numbers.overrides))
    except RecipeError as error:
        raise RecipeError(_explained(error.mistakes, axes, chosen)) from None


def _explained(mistakes: Sequence[Mistake], axes: Sequence[Axis], chosen: Settings) -> Iterator[Mistake]:
    for mistake in mistakes:
        hint = ""
        for axis, text in zip(axes, overrides(axes, chosen), strict=True):
            if text not in mistake.where:
                continue
            if axis.choices and "list" in mistake.message:
                hint = (
                    f". A list after {axis.key}= has the values to choose from; [[{', '.join(axis.choices)}]] has one "
                    "value, a list"
                )
            elif not axis.choices and not axis.integer and "whole number" in mistake.message:
                range_name = "logint" if axis.log else "int"
                hint = f". {axis.key}={range_name}({axis.low:.0f}, {axis.high:.0f}) draws whole numbers"
        yield replace(mistake, message=mistake.message + hint)


def _samples(axes: Sequence[Axis]) -> list[Settings]:
    """Settings that stand for all: every one if they are few; else the ends of each range, and some at random."""
    count = combinations(axes)
    if count is not None and count <= _MOST_CHECKED:
        return list(all_settings(axes))
    each = [axis.samples for axis in axes]
    first = tuple(values[0] for values in each)
    chosen = [(*first[:n], value, *first[n + 1 :]) for n, values in enumerate(each) for value in values]
    drawn = random.Random(0)
    corners = list(islice(product(*each), _MOST_CHECKED + 1))
    if len(corners) > _MOST_CHECKED:
        corners = [tuple(drawn.choice(values) for values in each) for _ in range(_MOST_CHECKED)]
    return list(dict.fromkeys([*chosen, *corners]))


def _best_of(recipe: Recipe) -> str:
    best = next((c.config.best for c in recipe.callbacks if c.name == "checkpoint"), None)
    if not best:
        raise UsageError(
            "The sweep has no score to compare trials by: --score acc1 or --score loss names a number of the "
            "evaluations, or the recipe does: callbacks.checkpoint.best."
        )
    return str(best)


def _for_score(recipe: Recipe, score: str) -> tuple[str, ...]:
    """The settings by which each trial keeps its best checkpoint by the score, and refuses an unknown one."""
    names = [component.name for component in recipe.callbacks]
    for name, does in _NEEDED.items():
        if name not in names:
            raise UsageError(
                f"A sweep needs the callback {name}, which {does} evaluations: add it to callbacks."
            )
    return (f"callbacks.checkpoint.best={json.dumps(score)}",)


def _devices(request: SweepRequest, machine: Machine, numbers: Set[int]) -> tuple[tuple[str, ...], ...]:
    if len(numbers) > 1:
        counts = ", ".join(map(str, sorted(numbers)))
        raise UsageError(
            f"These settings take different numbers of {spoken(machine.kind)}s ({counts}), and all trials of a sweep "
            "get as many: make a sweep for each number."
        )
    (each,) = numbers
    count = request.jobs * each
    if count > len(machine.devices):
        raise UsageError(
            f"--jobs {request.jobs} × --ranks {request.ranks} needs {count} devices, and {len(machine.devices)} are "
            "visible: give fewer jobs or ranks."
        )
    return tuple(machine.devices[slot * each : (slot + 1) * each] for slot in range(request.jobs))


def _facts_of(plan: SweepPlan) -> dict[str, Any]:
    """What must stay the same when the sweep goes on."""
    request = plan.request
    return {
        "recipe": str(request.recipe.resolve()),
        "digest of the recipe": hashlib.sha256(request.recipe.read_bytes()).hexdigest()[:16],
        "settings": list(request.texts), "score": plan.score, "seed": request.seed, "search": request.search,
        "prune": request.prune, "jobs": request.jobs, "ranks": request.ranks, "trials": request.trials,
    }  # fmt: skip


def open_folder(plan: SweepPlan) -> None:
    """Claims the sweep's folder. Raises UsageError if it has another sweep, or one and `resume` is not set."""
    path = plan.folder / REQUEST
    before: Mapping[str, Any] = {}
    if path.is_file():
        try:
            before = json.loads(path.read_text())
        except ValueError:
            raise UsageError(f"{path} is damaged: choose another folder with --output-dir DIR.") from None
    now = _facts_of(plan)
    if plan.request.resume and not before:
        raise UsageError(f"{plan.folder} holds no sweep to resume: leave --resume out to begin one.")
    if before and not plan.request.resume:
        raise UsageError(
            f"{plan.folder} holds a sweep. The same command with --resume goes on with it; --output-dir DIR begins "
            "another one."
        )
    changed = [key for key in before if key not in _MAY_CHANGE and before[key] != now.get(key)]
    if changed:
        lines = [f"  {key} was {_text(before[key])} and is {_text(now.get(key))}" for key in changed]
        raise UsageError(
            "\n".join([f"{plan.folder} holds a sweep that differs, so its trials cannot be compared with new ones:",
                       *lines, "Give the same values, or another --output-dir."])
        )  # fmt: skip
    if any((plan.folder / sign).exists() for sign in ("recipe.yaml", "checkpoints")):
        raise UsageError(
            f"{plan.folder} is a run's folder, not a sweep's: choose another with --output-dir DIR."
        )
    claim(plan.folder, None)
    with replacing(path) as partial:
        partial.write_text(json.dumps(now, indent=1, ensure_ascii=False))


def forget(plan: SweepPlan) -> None:
    """Makes the folder free for another sweep."""
    for name in (REQUEST, STUDY):
        (plan.folder / name).unlink(missing_ok=True)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
