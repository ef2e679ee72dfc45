"""Compares a training with the checkpoint that it resumes, which keeps all facts that decide the result.

The rule: a resume is refused if a run with the new settings from step 0 would not have reached this checkpoint. So the
number of ranks, the layout, the data's path, or the future part of a schedule may change; the loss may not, unless
--accept names it: then later checkpoints record the change.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paddle import nn
from paddle.optimizer import lr

from paddle_dp.core.batch_norm import statistics
from paddle_dp.core.plateau import Plateau
from paddle_dp.data.fingerprint import common
from paddle_dp.errors import CheckpointError, UsageError
from paddle_dp.identity.facts import (
    MAY_DIFFER,
    RunSignature,
    TrainingSettings,
    are_same,
    callback_facts,
    flat,
    packages,
    script_arguments,
    setup_facts,
    shown,
    threads,
)  # fmt: skip
from paddle_dp.identity.function_copy import copied_function
from paddle_dp.identity.source_code import MODULE_PREFIX
from paddle_dp.identity.task_facts import schedule_of, task_facts, unsaved_tensors
from paddle_dp.identity.walk import checksum
from paddle_dp.learner import Task
from paddle_dp.mesh import Mesh
from paddle_dp.part.annotation import CUTTABLE
from paddle_dp.units import Length

if TYPE_CHECKING:
    from paddle_dp.checkpoint import Checkpoint
    from paddle_dp.data import Loader

_MAX_LAYER_SETTINGS = 4000  # settings of layers that a checkpoint keeps one by one
_ALL_LAYERS = "model.all_layers"
_NAMED = 8  # changes that a message names one by one
_POINTS = 64  # rates of a schedule that are kept, at updates spread over it
_ABSENT = "not there"

# The longest of these prefixes of its key decides the rule for a change. docs/checks.md has the reasons.
FREE, NOTED, RATES, REFUSED, NEVER = "free", "told", "by its rates", "refused", "never"
RULES = {
    "": REFUSED,
    "callbacks": FREE, "metrics": NOTED, "evaluation": NOTED, "callback ": NOTED,
    "train.patience": FREE, "train.max_time": FREE, "watch": FREE, "dataset.reading": FREE,
    "guard": NOTED, "load": NOTED, "strategy": NOTED, "train.micro_batches": NOTED, "train.device": NOTED,
    "code of": NOTED, "arguments": NOTED,
    "package": NOTED, "python": NOTED, "device": NOTED, "threads": NOTED,
    "schedule": RATES, "train.length": RATES,
    "train.batch": NEVER, "train.seed": NEVER, "train.shuffle": NEVER, "train.drop_last": NEVER,
}  # fmt: skip
_COMPONENTS = ("model", "dataset", "loss", "optimizer", "schedule", "strategy")
_PATH_NAMES = ("path", "folder", "dir", "file", "cache", "root")


@dataclass(frozen=True)
class RunChange:
    """One difference from the checkpoint."""

    key: str
    was: Any
    now: Any
    rule: str
    note: str = ""

    def __str__(self) -> str:
        return f"{self.key} was {shown(self.was)} and is {shown(self.now)}{self.note}"


def identity(
    setup: TrainingSettings,
    task: Task,
    mesh: Mesh,
    loaders: Mapping[str, Loader | None],
    prints: Mapping[str, Any],
) -> RunSignature:
    """The identity of this training. `loaders` and `prints`, the fingerprints of their data sets, are by split."""
    data = {
        split: {"samples": loader.sampler.available, "read": prints.get(split, {})}
        for split, loader in loaders.items()
        if loader is not None
    }
    steps = loaders["train"].sampler.updates(setup.length) if setup.length and loaders["train"] else 0
    rates = rates_of(schedule_of(task), sorted({0, *(steps * n // _POINTS for n in range(_POINTS))}))
    return RunSignature(
        facts={**packages(mesh), **threads(mesh), **_described(setup, task)}, data=data, rates=rates
    )


def compare(  # noqa: PLR0913 - both sides, and what they are compared by
    checkpoint: Checkpoint,
    now: RunSignature,
    task: Task,
    setup: TrainingSettings,
    mesh: Mesh,
    updates: Callable[[Length], int],
    accept: Sequence[str] = (),
) -> tuple[list[str], RunSignature]:
    """The differences from the checkpoint to resume, in words; and `now` with all changes accepted so far. Collective.

    `updates`: the number of updates of a length. `accept`: keys, or prefixes of keys ("loss", "schedule.warmup"), that
    may change. Raises UsageError, the same on every rank, for any other change that makes it another run;
    CheckpointError without an identity to compare.
    """
    saved, step = checkpoint.state, int(checkpoint.state["progress"]["step"])
    if not (past := saved.get("identity")):
        raise CheckpointError(
            f"{checkpoint.folder} lacks its run's identity, so it cannot be resumed as the same run. To begin a new "
            f"run with its weights: {_from_weights(checkpoint, setup.recipe is not None)}."
        )
    changes = [*_order(saved, now, setup), *_data(past["data"], now)]
    schedule = schedule_of(task)
    settings = [_without_effect(change, updates) for change in _settings(saved, now, task, setup)]
    changes += _judged(settings, *_other_rate(saved, schedule), _is_spread(setup, schedule))
    if isinstance(schedule, Plateau):  # its rates follow from the evaluations
        changes = [
            replace(c, rule=REFUSED) if c.rule == NOTED and _decides_evaluations(c.key) else c
            for c in changes
        ]
    changed = [c for c in changes if c.rule == REFUSED and c.key.startswith(("model", "adapter"))]
    if misfit := _misfit(checkpoint, task) if changed else None:
        changes = [misfit, *(replace(c, rule=NEVER) if c in changed else c for c in changes)]
    refused = [c for c in changes if c.rule == NEVER or (c.rule == REFUSED and not _is_in(c.key, accept))]
    errors = mesh.gather(_error_text(checkpoint, refused, setup) if refused else "")
    if error := next(filter(None, errors), ""):
        raise UsageError(error)
    accepted = [{"step": step, "key": c.key, "was": c.was, "is": c.now} for c in changes if c.rule == REFUSED]
    sentences = [str(c) for c in sorted(changes, key=lambda c: c.rule != REFUSED)]
    return sentences, replace(now, accepted=(*past["accepted"], *accepted))


def _described(setup: TrainingSettings, task: Task) -> dict[str, Any]:
    """The recipe by dotted key; for a script, the settings of the script and its objects, under such keys."""
    facts = setup_facts(setup)
    if setup.recipe is not None:
        return {**facts, **callback_facts(setup.recipe.callbacks)}
    precision = {"train.dropout": task.dropout, **flat("train.precision", vars(task.precision))}
    callbacks = callback_facts([*setup.requested.callbacks, *setup.script_callbacks])
    return {**facts, **script_arguments(), **precision, **_object_facts(task), **callbacks}


def _object_facts(task: Task) -> dict[str, Any]:
    """Kinds and settings of the objects; which parameters are frozen."""
    facts = task_facts(task)
    layers = {k: v for k, v in facts.items() if k.startswith("model.") and not _splits(k, (v,), task)}
    if len(layers) > _MAX_LAYER_SETTINGS:
        digest = f"{checksum(json.dumps(layers, sort_keys=True, default=str))} of {len(layers)} settings"
        facts = {key: value for key, value in facts.items() if key not in layers} | {_ALL_LAYERS: digest}
    frozen = [name for name, parameter in task.model.named_parameters() if parameter.stop_gradient]
    summary = "none" if not frozen else f"{len(frozen)}, {checksum(chr(10).join(frozen))}"
    return {**facts, **unsaved_tensors(task.model), "frozen parameters": summary}


def _misfit(checkpoint: Checkpoint, task: Task) -> RunChange | None:
    """The first tensor that the model and the checkpoint do not share, or not in one shape: nothing can be accepted
    then, as nothing can be loaded."""
    saved, tensors = [n for n in checkpoint.names if n.startswith("model/")], task.model.state_dict()
    was = {name.removeprefix("model/"): list(checkpoint.shape(name)) for name in saved}
    now = {name: list(tensor.shape) for name, tensor in tensors.items() if name not in task.base}
    name = next((name for name in (*now, *was) if was.get(name) != now.get(name)), None)
    if name is None:
        return None
    return RunChange(f"tensor {name}", was.get(name, _ABSENT), now.get(name, _ABSENT), NEVER)


def _order(saved: Mapping[str, Any], now: RunSignature, setup: TrainingSettings) -> list[RunChange]:
    """Changes that would change the samples of global batches. They are never accepted: in the middle of an epoch some
    samples would be read twice and others never.
    """
    train = "train." if setup.recipe else ""
    values = {"samples": now.data["train"]["samples"], "batch": setup.batch, "seed": setup.seed}
    names = {"samples": "samples in the data set", "batch": f"{train}batch", "seed": f"{train}seed"}
    ramp, before = setup.requested.train.batch_ramp, {"ramp": None, **saved["data"]}
    values["ramp"], names["ramp"] = ramp and str(ramp), f"{train}batch_ramp"
    return [
        RunChange(names[key], before[key], values[key], NEVER) for key in names if before[key] != values[key]
    ]


def _data(saved: Mapping[str, Any], now: RunSignature) -> list[RunChange]:
    """The first group of samples in each split that differs from the checkpoint's."""
    changes = []
    for split, label, rule in (("train", "training", REFUSED), ("test", "held-out", NOTED)):
        before, after = saved.get(split), now.data.get(split)
        if before is None or after is None:
            continue
        if before["samples"] != after["samples"]:
            if split == "test":
                changes.append(
                    RunChange("samples in the held-out data", before["samples"], after["samples"], NOTED)
                )
            continue
        old, new = before["read"], after["read"]
        key = next((key for key in common(old, new) if old[key] != new[key]), None)
        if key is not None:
            changes.append(RunChange(f"dataset ({key} of the {label} data)", old[key], new[key], rule))
    return changes


def data_changes(saved: Mapping[str, Any], now: RunSignature) -> list[RunChange]:
    """The known differences from the training data in a checkpoint or a certificate (`saved`); [] for none."""
    before, after = saved["train"]["samples"], now.data["train"]["samples"]
    if before != after:
        return [RunChange("samples in the data set", before, after, NEVER)]
    return [change for change in _data(saved, now) if change.rule == REFUSED]


def _settings(
    saved: Mapping[str, Any], now: RunSignature, task: Task, setup: TrainingSettings
) -> Iterator[RunChange]:
    """Yields the facts that differ."""
    facts, past = now.state()["facts"], saved["identity"]["facts"]
    same_version = past["package paddle_dp"] == facts["package paddle_dp"]
    replaced = {c for c in _COMPONENTS if past.get(f"{c}.use") != facts.get(f"{c}.use")}
    for component in sorted(replaced):
        was, value = (side.get(f"{component}.use", side.get(component, _ABSENT)) for side in (past, facts))
        yield RunChange(component, was, value, _rule(component, was, value, task))
    compared_elsewhere = {*replaced, *MAY_DIFFER}
    for key in dict.fromkeys([*facts, *past]):
        was, value = past.get(key, _ABSENT), facts.get(key, _ABSENT)
        if (
            are_same(was, value)
            or key.partition(".")[0] in compared_elsewhere
            or key in ("train.batch", "train.seed")
            or key.startswith("train.batch_ramp")
        ):
            continue
        if _ABSENT in (was, value) and (not same_version or key.startswith(MODULE_PREFIX)):
            continue  # the version has added or removed it; earlier imports add modules
        if key == _ALL_LAYERS and not same_version:
            continue  # the version may have added or removed settings
        rule = _rule(key, was, value, task)
        if key == "train.drop_last" and now.data["train"]["samples"] % setup.batch == 0:
            rule = NOTED  # there is no short batch
        if rule != FREE:
            yield RunChange(key, was, value, rule)


def _rule(key: str, was: Any, now: Any, task: Task) -> str:
    """The rule for a change, by its key, and in some cases by the values and the model."""
    if key == "optimizer":
        return NEVER  # another optimizer cannot load the states
    if key.startswith("dataset.") and is_path(key, was, now):
        return NOTED  # the samples are compared
    if key == "strategy.sync_batch_norm" and statistics(task.model):
        return REFUSED
    if _splits(key, (was, now), task):
        return NOTED  # as `strategy` is: it says how a layout divides the same function
    return RULES[max((begin for begin in RULES if key.startswith(begin)), key=len)]


def _splits(key: str, values: Sequence[Any], task: Task) -> bool:
    """True for an entry of a model's tables `cuts` and `attention_methods`, from a recipe or on a layer; by its values,
    as a model may have settings of these names. Not for `blocks`, by which exact dropout numbers its masks."""
    entries = [entry for v in values if v != _ABSENT for entry in (v if isinstance(v, list) else [v])]
    segments = key.split(".")
    if segments[0] != "model" or not all(isinstance(entry, str) for entry in entries):
        return False
    if "cuts" in segments[:-1]:
        return set(entries) <= {*CUTTABLE}
    layers = task.model.sublayers(include_self=True) if "attention_methods" in segments else []
    return bool(layers) and all(any(_is_method(type(x), e) for x in layers) for e in entries)


def _is_method(kind: type, name: str) -> bool:
    """True for a method of a class, also a decorated one, as by paddle.jit.to_static."""
    attribute = getattr(kind, name, None)
    return callable(attribute) and not isinstance(attribute, (type, nn.Layer))


def _decides_evaluations(key: str) -> bool:
    return "held-out data" in key or key.startswith(("metrics", "evaluation.samples"))


def rates_of(schedule: Any, steps: Sequence[int]) -> list[list[float]]:
    """[[step, rate], …] of a schedule that is a function of the step, as a recipe's are; [] for others, and for one
    whose function cannot be copied: a call of the function itself could change the training, if it counts its calls."""
    if not _is_function_of_step(schedule):
        return []
    try:
        copied = _copied(schedule)
        rates = []
        for step in steps:
            copied.step(step)
            rates.append([step, copied()])
    except Exception:  # noqa: BLE001 - a user's function may raise anything, and the training itself will tell
        return []
    return rates


def _copied(schedule: Any) -> Any:
    """A copy of a schedule, and of schedules within it, that can be stepped. Raises UncopiedError."""
    copied = copy.copy(schedule)
    if (function := getattr(schedule, "lr_lambda", None)) is not None:
        copied.lr_lambda = copied_function(function)
    within = {k: _copied(value) for k, value in vars(copied).items() if isinstance(value, lr.LRScheduler)}
    vars(copied).update(within, verbose=False)
    return copied


def _is_function_of_step(schedule: Any) -> bool:
    """True if a schedule of Paddle's, and any within it, computes the rate of any step without earlier ones."""
    if not isinstance(schedule, lr.LambdaDecay) and type(schedule).__module__ != lr.__name__:
        return False
    recursive = (lr.ReduceOnPlateau, lr.LinearLR)
    within = [value for value in vars(schedule).values() if isinstance(value, lr.LRScheduler)]
    return not isinstance(schedule, recursive) and all(map(_is_function_of_step, within))


def _other_rate(saved: Mapping[str, Any], schedule: Any) -> tuple[bool, Sequence[float] | None]:
    """Returns whether rates can be compared, and (step, rate, rate now) of the first update with another rate, up to
    the next one, or None.
    """
    step = int(saved["progress"]["step"])
    rates = (saved.get("identity") or {"rates": []})["rates"]
    before = [point for point in rates if point[0] < step]
    if (state := saved.get("schedule")) and state.get("last_epoch") == step:
        before.append([step, state["last_lr"]])
    after = rates_of(schedule, [int(point[0]) for point in before])
    most = max((abs(rate) for _, rate in before), default=0.0)
    for (at, was), (_, now) in zip(before, after, strict=False):
        # A cosine computed from rate to rate has the rounding error of its largest one.
        if abs(was - now) > max(1e-9 * max(abs(was), abs(now)), 1e-12 * most):
            return True, (at, was, now)
    return bool(after), None


def load_schedule(schedule: Any, saved: Mapping[str, Any], now: RunSignature | None = None) -> None:
    """Continues a schedule from a checkpoint's state: one that is a function of the step, and another one than the
    checkpoint's, with its own rate; any other with the checkpoint's, as it may follow from earlier ones, unless the
    run's identity, `now`, has accepted its change: it takes the steps so far again, if they are all that it keeps."""
    state, current = saved["schedule"] or {}, schedule.state_dict()
    step = state.get("last_epoch", saved["progress"]["step"])
    past = (saved.get("identity") or {}).get("accepted", ())
    keys = [change["key"] for change in now.accepted[len(past) :]] if now is not None else []
    accepted = any(key.startswith(("schedule", "train.length")) for key in keys)
    replaced = accepted or state.keys() != current.keys() or _other_rate(saved, schedule)[1] is not None
    if replaced and _is_function_of_step(schedule):
        schedule.step(step)
    elif accepted and _keeps_only_steps(current):
        if schedule.last_epoch > step:  # the guard rewinds: begin as LRScheduler does
            vars(schedule).update(last_epoch=-1, last_lr=schedule.base_lr)
        for _ in range(step - schedule.last_epoch):
            schedule.step()
    elif state:
        schedule.set_state_dict({**current, **state})
        if isinstance(schedule, lr.CosineAnnealingWarmRestarts) and "T_cur" not in state:
            _set_period(schedule)
        if isinstance(schedule, Plateau):  # its peak may be another
            schedule.step(schedule.last_epoch)


def _keeps_only_steps(state: Mapping[str, Any]) -> bool:
    """True for a schedule's state, with the one within it of a warm-up, that is the number of steps and their rate."""
    within = [value for key, value in state.items() if key not in ("last_epoch", "last_lr")]
    return all(isinstance(value, Mapping) and _keeps_only_steps(value) for value in within)


def _set_period(schedule: Any) -> None:
    """Restores the period of a schedule with restarts, and the update in it, which its state lacks (3.3.1)."""
    at, length = schedule.last_epoch, schedule.T_0
    while at >= length:
        at, length = at - length, length * schedule.T_mult
    schedule.T_cur, schedule.T_i = at, length


def _is_spread(setup: TrainingSettings, schedule: Any) -> bool:
    """Whether a recipe makes its schedule for the training's number of steps. A script's has settings, or a formula."""
    part = getattr(setup.requested, "schedule", None)
    names = getattr(part and part.config, "training_arguments", ("steps",))  # of a dotted name's parameters
    return part is not None and "steps" in names and not isinstance(schedule, Plateau)


def _without_effect(change: RunChange, updates: Callable[[Length], int]) -> RunChange:
    """The change as a note if it is a length of as many updates as before, in other words."""
    if change.key != "train.length" or None in (change.was, change.now):
        return change
    same = updates(Length.parse(change.was)) == updates(Length.parse(change.now))
    return replace(change, rule=NOTED) if same else change


def _judged(
    changes: list[RunChange], known: bool, other: Sequence[float] | None, spread: bool
) -> list[RunChange]:
    """Refuses changes of the schedule and the length if a rate that was used would differ. For a schedule that is not
    a function of the step its settings count, and the length if it is `spread` over it."""
    note = "" if other is None else f" (update {other[0] + 1}: rate {other[1]:.6g}, and now {other[2]:.6g})"

    def judged(change: RunChange) -> RunChange:
        if change.rule != RATES:
            return change
        refused = other is not None or (not known and (spread or change.key.startswith("schedule")))
        return replace(change, rule=REFUSED if refused else NOTED, note=note)

    if other is not None and all(change.rule != RATES for change in changes):  # its code has changed
        changes = [*changes, RunChange("schedule", "another function", "this one", RATES)]
    return [judged(change) for change in changes]


def is_path(key: str, *values: Any) -> bool:
    """True if a setting of a data set is a path: the samples are compared instead."""
    name = key.rpartition(".")[2].lower()
    path = any(isinstance(value, Mapping) or (isinstance(value, str) and os.sep in value) for value in values)
    return path or any(path_name in name for path_name in _PATH_NAMES)


def _is_in(key: str, accept: Sequence[str]) -> bool:
    """True if a key was accepted, by itself or by a prefix."""
    return any(key == accepted or key.startswith((f"{accepted}.", f"{accepted} ")) for accepted in accept)


def _error_text(checkpoint: Checkpoint, refused: Sequence[RunChange], setup: TrainingSettings) -> str:
    recipe = setup.recipe is not None
    another = "leave --resume out" if recipe else "leave resume out"
    more = f"; and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
    changes = "; ".join(map(str, refused[:_NAMED]))
    keys = list(dict.fromkeys(c.key.partition(" ")[0] for c in refused if c.rule != NEVER))
    if more:
        keys = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    how = f"--accept {','.join(keys)}" if recipe else f"accept={keys!r}"
    never = [c.key for c in refused if c.rule == NEVER][:_NAMED]
    old, them = ("the old values", "them") if len(refused) > 1 else ("the old value", "it")
    return (
        f"{checkpoint.folder} cannot be resumed as the same run: {changes}{more}. Give {old}, "
        + ("" if never else f"or accept {them}: {how}, ")
        + f"or {another} for a new run (its folder's content is moved aside, not lost)."
        + (f" {', '.join(never)} cannot be accepted; the others can: {how}." if never and keys else "")
        + (f" To begin a new run with its weights: {_from_weights(checkpoint, recipe)}." if never else "")
        + (" docs/checks.md lists what may change freely." if keys else "")
    )


def _from_weights(checkpoint: Checkpoint, recipe: bool) -> str:
    """How to begin a new run with the weights of this checkpoint: it may have another batch, and other data."""
    if "base" in checkpoint.state:  # an adapter alone
        return f"paddle-dp merge {checkpoint.folder} -o FILE, then load.path=FILE, without --resume, in another folder"
    if recipe:
        return f"leave --resume out, and give load.path={checkpoint.folder} and another --output-dir"
    return f"leave resume out, and give load={str(checkpoint.folder)!r} and another folder"
