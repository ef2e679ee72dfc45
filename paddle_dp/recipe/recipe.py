"""The recipe as a type: its keys, and the checks of those that must fit one another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, model_validator

from paddle_dp.errors import UsageError
from paddle_dp.part import Part, adapted, freeze, lazily
from paddle_dp.part.groups import turns_of
from paddle_dp.recipe.schema import (
    DEFAULTS,
    Ema,
    EvaluationSettings,
    Guard,
    Load,
    LoaderSettings,
    Mix,
    TurnSettings,
    WatchSettings,
)  # fmt: skip
from paddle_dp.recipe.shelf_schema import EditorSchema, OnShelf
from paddle_dp.recipe.train_schema import Train, refuse_epochs


def _file_name(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"'{name}' cannot be the name of a folder")
    return name


_ONCE = ("console", "metrics", "dashboard", "tensorboard", "trackio", "swanlab", "report")
"""Callbacks that write lines to the screen or points to a curve: two of them write each twice."""


class Recipe(BaseModel):
    """A recipe. `loss: null` uses the model's `loss(outputs, targets)`; `output_dir` is runs/<name> by default."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: Annotated[str, AfterValidator(_file_name)] = "run"
    """The run's name; the file's, without `.yaml`, by default."""

    model: Annotated[Part, OnShelf("models")]
    """The model: a part of `models/`."""

    dataset: Annotated[Part, OnShelf("datasets")]
    """The data set: a part."""

    loss: Annotated[Part, OnShelf("losses")] | None = None
    """The loss: a part. Without one, the model's method `loss(outputs, targets)`."""

    optimizer: Annotated[Part, OnShelf("optimizers")]
    """The optimizer: a part."""

    schedule: Annotated[Part, OnShelf("schedules")]
    """The learning rate over the steps: a part. `{use: constant, learning_rate: 0.001}` by default."""

    strategy: Annotated[Part, OnShelf("strategies")]
    """The strategy, which splits the model over the ranks: a part. `{use: data_parallel}` by default."""

    train: Train
    """Length, batch, precision and seed."""

    loader: LoaderSettings = LoaderSettings()
    """The reading of samples."""

    watch: WatchSettings = WatchSettings()
    """Limits after which a job without progress is ended."""

    load: Load | None = None
    """Initial weights: `{path: runs/old, only: [backbone.*], strict: false}`; a resumed run takes its checkpoint's."""

    guard: Guard = Guard()
    """The reaction to an update with wrong numbers."""

    adapter: Annotated[Part, OnShelf("adapters")] | None = None
    """Small additional parameters: a part. They alone are trained and saved; the model's parameters are frozen."""

    ema: Ema | None = None
    """An average of the weights: `{decay: 0.999, every: 1 step}`; evaluated as `ema_loss`, `ema_acc1` …."""

    turns: dict[str, TurnSettings] = {}
    """Several losses, each of which trains some of the parameters, one after the other with each global batch:
    `{discriminator: {match: discriminator.*}, generator: {match: generator.*}}`."""

    mix: Mix | None = None
    """Mixup and CutMix of the training images: `{mixup: 0.2, cutmix: 1.0}`."""

    evaluation: EvaluationSettings = EvaluationSettings()
    """How much of the held-out data is evaluated, and in which batches: `{batch: 256, samples: 10000}`."""

    metrics: tuple[Annotated[Part, OnShelf("metrics", listed=True)], ...] = ()
    """Further scores of each evaluation: a list of parts, such as `[{use: auc}]` ([metrics.md](metrics.md))."""

    callbacks: tuple[Annotated[Part, OnShelf("callbacks", listed=True)], ...]
    """A list of parts. console, metrics, dashboard, evaluate and checkpoint by default."""

    output_dir: str | None = None
    """The run's folder; `runs/<name>` by default."""

    @model_validator(mode="after")
    def _lengths_fit_the_ramp(self) -> Recipe:
        """Under train.batch_ramp epochs have unequal numbers of updates, and a schedule counts updates."""
        schedule = getattr(self, "schedule", None)
        if self.train.batch_ramp is not None and schedule is not None:
            refuse_epochs(schedule.config)
        return self

    @model_validator(mode="after")
    def _callbacks_write_once(self) -> Recipe:
        check_callbacks(self)
        return self

    @model_validator(mode="after")
    def _ranks_wait_for_the_schedule(self) -> Recipe:
        """Refuses plateau, which lowers the rate of all ranks after one update, for ranks that do not wait."""
        name = self.schedule.name if hasattr(self, "schedule") else ""  # a script's stand-in recipe has none
        if name == "plateau" and self.strategy.config.layout(2).asynchronous:
            raise ValueError(
                f"schedule: plateau lowers the rate of all ranks after one update, and ranks of {self.strategy.name} "
                "do not wait for one another here: choose another schedule, such as cosine, or a strategy that waits"
            )
        return self

    @model_validator(mode="after")
    def _groups_fit(self, info: ValidationInfo) -> Recipe:
        """Checks the optimizer's groups, the adapter and turns against the model, if it can be built without memory."""
        check_turns(self)
        prepares = hasattr(self.optimizer.config, "prepare")
        named = self.optimizer.groups or self.adapter or self.turns or prepares
        if named and (info.context or {}).get("tries", True):
            try:
                with lazily():
                    self.build_model()
            except UsageError:
                raise
            except Exception:  # noqa: BLE001 - a model that needs memory: a rank will check them
                return self
        return self

    def build_model(self) -> Any:
        """Builds the whole model with its adapter, and freezes parameters as the adapter and `optimizer.groups` ask.
        Raises RecipeError for groups, an adapter or turns that do not fit the model."""
        model = self.model.build()
        if "optimizer" in self.model_fields_set:  # a script's stand-in recipe has none
            model, before = adapted(model, self.adapter, self.train.seed)
            freeze(model, self.optimizer.groups, before)
            self.optimizer.prepare(model)
        if self.turns:
            turns_of({name: turn.match for name, turn in self.turns.items()}, model)
        return model

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output_dir).expanduser() if self.output_dir else Path("runs") / self.name


def check_callbacks(recipe: Recipe) -> None:
    """Raises ValueError for two callbacks that would write the same lines to the screen or to a file of the run."""
    names = [callback.name for callback in recipe.callbacks]
    if twice := [name for name in _ONCE if names.count(name) > 1]:
        raise ValueError(
            f"callbacks: {twice[0]} is there twice, and would write everything twice: leave one out"
        )


def check_turns(recipe: Recipe) -> None:
    """Raises ValueError for turns next to a setting that would act on one loss, or under a strategy without turns."""
    if not recipe.turns:
        return
    # A script's stand-in holds the turns' loss.
    if recipe.loss is not None and "optimizer" in recipe.model_fields_set:
        raise ValueError("loss: each of the turns has a loss: leave it out, or set turns.<name>.loss")
    if min(turn.every.count for turn in recipe.turns.values()) > 1:
        raise ValueError("turns: none has its turn in every step: leave `every` out of one of them")
    for name in recipe.turns:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name == "ema" or name.startswith("ema_"):
            raise ValueError(
                f"turns: '{name}' is no name for a turn, whose numbers are <turn>_loss: take small letters, digits and "
                "_, and not ema, which names the averages' numbers"
            )
    settings = {
        "guard": recipe.guard != Guard()
        and "a turn cannot be refused once the turns before it have changed weights",
        "train.precision": recipe.train.precision.level == "O2"
        and any(turn.optimizer for turn in recipe.turns.values())
        and "optimizers of single turns keep no float32 copies of weights: set level: O1, or one optimizer for all",
        "mix": recipe.mix is not None
        and "a turn's loss compares inputs, such as noise, with targets, and a blend of two noises is none",
        "train.compile": recipe.train.compile
        and "a program is traced once, and each turn fixes other parameters",
        "strategy": not recipe.strategy.config.takes_turns
        and "take single, data_parallel without compress, or hybrid with data, sharding and tensor alone",
    }
    for key, reason in settings.items():
        if reason:
            raise ValueError(f"{key}: does not go with turns: {reason}")


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe, for editors with the YAML language server: one variant for each part on each shelf.
    Imports all parts, and thus paddle."""
    schema = Recipe.model_json_schema(schema_generator=EditorSchema)
    schema["required"] = [key for key in schema["required"] if key not in DEFAULTS]
    for key, default in DEFAULTS.items():
        schema["properties"][key]["default"] = default
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
