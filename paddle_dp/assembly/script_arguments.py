"""Reads the arguments of `Trainer.of`: parts by name as in a recipe, objects of the script's own, and settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from pydantic import TypeAdapter

from paddle_dp.assembly.argument_types import check_types
from paddle_dp.core.turns import MakeTurnOptimizers
from paddle_dp.errors import UsageError, did_you_mean
from paddle_dp.part import Annotation, ErrorContext, Part, annotate, read_part, read_settings
from paddle_dp.part.aliases import find_hint
from paddle_dp.part.call import config_of, validate_callable
from paddle_dp.part.settings import settings_of_objects
from paddle_dp.recipe import BatchRamp, Load, LoaderSettings, Train, TurnSettings
from paddle_dp.recipe.train_schema import refuse_epochs

OWNER = ErrorContext(subject="Trainer.of", prefix="Trainer.of")
S = TypeVar("S")
P = ParamSpec("P")
_DATA = r"(?P<part>(train|eval|valid|val|test|dev)\w*?_?)?(data|dataset|dataloader|loader|set)s?"  # other tools' words
# Settings of a recipe's `train`, and of the recipe, that are no arguments of Trainer.of.
_ELSEWHERE = {
    "device": "Here that is join(device=…), before the model is made.",
    "patience": "Of exchanges on CPUs that is join(patience=…), in seconds; of evaluations callbacks=[…, {'use': "
    "'early_stop', 'patience': …}].",
    "compile": "A recipe alone has it: train.compile.",
    "max_time": "A recipe alone has it: train.max_time. SIGTERM lets a script's training save a checkpoint and end.",
    "watch": "A recipe alone has it.",
}
_ANY_LENGTH = ("constant", "inverse_sqrt", "milestones", "plateau")  # schedules whose rates it leaves alone
_BY_NAME = (  # of an optimizer's partial
    "Give it settings alone, by name, as in partial(AdamW, weight_decay=0.1): the parameters are the model's, and the "
    "learning rate belongs into the schedule, such as schedule={'use': 'constant', 'learning_rate': 1e-3}."
)
NameOrSettings = str | Mapping[str, Any]
"""A part as a recipe names it: "adamw", or {"use": "adamw", "clip": 1.0}."""


def answering_unknown(make: Callable[P, S]) -> Callable[P, S]:
    """Wraps `Trainer.of`: an unknown argument is answered as an unknown key of a recipe is, and one of a wrong type by
    the types that it takes. Raises UsageError."""
    parameters = list(inspect.signature(make).parameters.values())[1:]
    names = [parameter.name for parameter in parameters]
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]

    @wraps(make)
    def answered(*arguments: P.args, **named: P.kwargs) -> S:
        if len(arguments) > 1:
            raise UsageError(
                "Trainer.of takes its arguments by name: model=…, loss=…, optimizer=…, train=…, batch=…."
            )
        if unknown := [name for name in named if name not in names]:
            raise UsageError(f"Trainer.of has no argument '{unknown[0]}'.{_meant(unknown[0], names)}")
        check_types(named, required)
        return make(*arguments, **named)

    return answered


def _meant(name: str, names: Sequence[str]) -> str:
    """The sentences on the argument that is meant by an unknown one."""
    if data := re.fullmatch(_DATA, name):
        return f" Data sets are train and test: {'test' if data['part'] and data['part'][:2] != 'tr' else 'train'}=…."
    hint = find_hint(name, exactly=True)
    if hint and not hint.key:
        return " Here that is resume=…." if "--resume" in hint.note else hint.sentence
    key = hint.key if hint else name
    group, _, last = {"output_dir": "folder", "name": "folder"}.get(key, key).rpartition(".")
    if last in _ELSEWHERE and group in ("", "train"):
        return f" {_ELSEWHERE[last]}"
    note = f" ({hint.note})" if hint and hint.tool and hint.note else ""
    if (last in names and group in ("", "train")) or (last == "use" and group in names):
        return f" Here that is {group if last == 'use' else last}=…{note}."
    shelf, _, part = group.rpartition(".") if group.count(".") else (group, "", last)
    if shelf in ("callbacks", "metrics"):  # lists
        setting = f"{{'use': '{part}', '{last}': …}}" if part != last else f"'{part}'"
        return f" Here that is {shelf}=[…, {setting}]{note}."
    if group in names and group not in ("train", "model"):  # objects here
        return f" Here that is {group}={{'{last}': …}}{note}."
    return did_you_mean(name, names)


@dataclass(frozen=True)
class ObjectConfig:
    """Replaces a part's Config if a script gave the object itself; has the settings that a strategy reads."""

    instance: Any

    def build(self) -> Any:
        return self.instance

    @property
    def heads(self) -> int:
        return self._size("heads")

    @property
    def kv_heads(self) -> int:
        return self._size("kv_heads")

    @property
    def length(self) -> int:
        return self._size("length")

    def _size(self, name: str) -> int:
        size = getattr(self.instance, name, 0)
        return size if isinstance(size, int) else 0


def wrap_object(shelf: str, thing: Any) -> Part:
    return Part(shelf, type(thing).__name__, ObjectConfig(thing))


def annotate_layers(model: Any, blocks: Sequence[Any], **tables: Mapping[str, str]) -> None:
    """Raises RecipeError for a pattern that matches no layer, or an unknown way to cut one."""
    if blocks or any(tables.values()):
        settings = {name: dict(table) for name, table in tables.items()}
        annotation = read_settings(Annotation, settings, ErrorContext(subject="Trainer.of"))
        annotate(model, replace(annotation, blocks=tuple(blocks)), "Trainer.of")


def read_named(shelf: str, value: NameOrSettings) -> Part:
    return read_part(shelf, {"use": value} if isinstance(value, str) else value)


def named(shelf: str, value: Any) -> Part | None:
    """Reads a part that is given as in a recipe; returns None for an object of the script's own."""
    return read_named(shelf, value) if isinstance(value, (str, Mapping)) else None


def built_loss(value: Any) -> Any:
    return component.build() if (component := named("losses", value)) else value


def named_metric(value: Any) -> tuple[str, Any]:
    """(Its name in messages, the metric.) Raises UsageError for something else."""
    if component := named("metrics", value):
        return f"metrics.{component.name}", component.build()
    name = getattr(value, "__name__", type(value).__name__)
    if isinstance(value, type):
        raise UsageError(f"Trainer.of.metrics: {name} is a class: give an object, metrics=[{name}()].")
    if not (callable(value) or hasattr(value, "compute")):
        raise UsageError(
            f"Trainer.of.metrics: {name} is no function of (outputs, targets), and has no compute (docs/metrics.md)."
        )
    return f"Trainer.of.metrics: {name}", value


def is_optimizer_class(value: Any) -> bool:
    """True for a class, or a partial of one with settings by name, partial(AdamW, weight_decay=0.1)."""
    return isinstance(value.func if isinstance(value, partial) and not value.args else value, type)


def _sets_rate(value: partial[Any]) -> bool:
    """True if the arguments without a name in the partial of an optimizer's class bind what the training provides."""
    kind = value.func
    if not isinstance(kind, type) or validate_callable(kind, "optimizers") is not None:
        return False
    try:
        bound = inspect.signature(kind).bind_partial(*value.args).arguments
    except TypeError:  # too many
        return True
    return not {"learning_rate", "parameters"}.isdisjoint(bound)


def optimizer_or_maker(value: Any) -> Any:
    """Raises UsageError for several optimizers, for a class that is none, and for wrong settings of a partial."""
    if isinstance(value, (list, tuple)):
        raise UsageError(
            f"optimizer: one optimizer updates all parameters here, and this is a {type(value).__name__} of "
            f"{len(value)}. Give one, with parameter groups, or one for each loss in turns=… (docs/turns.md)."
        )
    if isinstance(value, partial) and value.args and _sets_rate(value):
        slip = f"partial({value.func.__name__}, {value.args[0]!r}, …) has an argument without a name"
        raise UsageError(f"optimizer: {slip}. {_BY_NAME}")
    if is_optimizer_class(value):
        kind, settings = (value.func, value.keywords) if isinstance(value, partial) else (value, {})
        if wrong := validate_callable(kind, "optimizers"):
            raise UsageError(f"optimizer: {kind.__name__} {wrong}.")
        try:
            config = config_of(kind, "optimizers")
        except ValueError as error:
            raise UsageError(f"optimizer: {kind.__name__}: {error}.") from error
        if provided := [name for name in config.training_arguments if name in settings]:
            raise UsageError(
                f"optimizer: partial({kind.__name__}, …) sets {provided[0]}, which the training provides. {_BY_NAME}"
            )
        owner = ErrorContext(subject=f"optimizer {kind.__name__}", prefix="optimizer")
        return settings_of_objects(config, settings, owner).build
    return component.build if (component := named("optimizers", value)) else value


def built_schedule(value: Any, steps: int, steps_per_epoch: int, train: Train) -> Any:
    """Raises UsageError for a schedule given as in a recipe when the length that it is spread over is not known, and
    for lengths in epochs under a batch_ramp."""
    if (component := named("schedules", value)) is None:
        return value
    taken = getattr(component.config, "training_arguments", ("steps",))  # of a dotted name's parameters
    if not steps and "steps" in taken and component.name not in _ANY_LENGTH:
        raise UsageError(
            f'schedule {value}: it is spread over the whole training: give length="3 epochs", too, and call fit().'
        )
    if train.batch_ramp is not None:
        try:
            refuse_epochs(component.config)
        except ValueError as error:
            raise UsageError(f"Trainer.of.{error}") from None
    return component.build(steps=steps, steps_per_epoch=steps_per_epoch, batch=train.batch)


def read_group(kind: type[S], value: Any, key: str) -> S:
    """Reads the settings of a key as in a recipe; an instance stays as it is."""
    if isinstance(value, kind):
        return value
    return read_settings(kind, dict(value), ErrorContext(subject=key, prefix=key))


def optimizer_of_turns(turns: Mapping[str, TurnSettings], optimizer: Part | None) -> Any:
    """The function that makes the optimizers of turns; None if no turn names one. Raises UsageError for a finished
    optimizer of the other turns."""
    if all(turn.optimizer is None for turn in turns.values()):
        return None
    if optimizer is None and any(turn.optimizer is None for turn in turns.values()):
        raise UsageError(
            'Trainer.of.turns: some name an optimizer: give the others\' by its word, too, such as "adamw".'
        )
    return MakeTurnOptimizers(optimizer, turns)


def read_turns(value: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, TurnSettings], dict[str, Any]]:
    """The settings of turns, and the losses that are callables, by turn. Raises UsageError for other types."""
    if not isinstance(value, Mapping) or not all(isinstance(turn, Mapping) for turn in value.values()):
        raise UsageError(
            'Trainer.of.turns: give the settings of each turn by its name: {"critic": {"match": ["critic.*"]}, …}.'
        )
    if wrong := [name for name in value if not isinstance(name, str)]:
        raise UsageError(f"Trainer.of.turns: {wrong[0]!r} is no name for a turn: give a text.")
    losses = {name: turn["loss"] for name, turn in value.items() if callable(turn.get("loss"))}
    settings = {}
    for name, turn in value.items():
        named_settings = {
            key: setting for key, setting in turn.items() if key != "loss" or name not in losses
        }
        settings[name] = read_group(TurnSettings, named_settings, f"turns.{name}")
    return settings, losses


def read_load(value: Load | Mapping[str, Any] | str | Path | None) -> Load | None:
    """Reads `load` as in a recipe, or a path alone."""
    if value is None:
        return None
    return read_group(Load, {"path": str(value)} if isinstance(value, (str, Path)) else value, "load")


def loader_settings(value: LoaderSettings | Mapping[str, Any] | None) -> LoaderSettings:
    """Reads `loader` as in a recipe; a timeout may be a number of seconds."""
    if isinstance(value, Mapping) and isinstance(timeout := value.get("timeout"), (int, float)):
        value = {**value, "timeout": f"{timeout} s"}
    return read_group(LoaderSettings, value or {}, "loader")


def check_lists(**lists: Any) -> None:
    """Raises UsageError for an argument that is no list."""
    for name, value in lists.items():
        if isinstance(value, (str, Mapping)) or not isinstance(value, Sequence):
            raise UsageError(f"Trainer.of.{name}: {value!r} is not a list: write {name}=[…].")


def check_mappings(**mappings: Any) -> None:
    """Raises UsageError for an argument that is no mapping."""
    for name, value in mappings.items():
        if not isinstance(value, Mapping):
            raise UsageError(f"Trainer.of.{name}: {value!r} is not a mapping: write {name}={{…}}.")


def plain_ramp(value: Any) -> Any:
    """A ramp of batches as a recipe writes it."""
    return TypeAdapter(BatchRamp).dump_python(value, mode="json") if isinstance(value, BatchRamp) else value


def plain(**settings: Any) -> dict[str, Any]:
    """The settings with NumPy numbers as Python numbers."""
    return {name: x.item() if isinstance(x, np.generic) else x for name, x in settings.items()}
