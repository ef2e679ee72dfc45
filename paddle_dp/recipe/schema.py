"""The recipe as types: these fields are the YAML keys, and there are no others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict

from paddle_dp.part import Part
from paddle_dp.recipe.on_shelf import OnShelf
from paddle_dp.recipe.precision import Precision, PrecisionSetting
from paddle_dp.units import Count, Duration, Length, Positive

FLOAT32 = Precision()


def _some(length: Length) -> Length:
    if not length.count:
        raise ValueError(f"'{length}' is no training at all")
    return length


def _file_name(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"'{name}' cannot be the name of a folder")
    return name


@dataclass(frozen=True, kw_only=True)
class Train:
    """How the model learns. `batch` is the global batch, on any number of ranks; `micro_batches` cuts it in time."""

    length: Annotated[Length, AfterValidator(_some)]
    batch: Positive
    micro_batches: Positive = 1
    precision: PrecisionSetting = FLOAT32
    seed: Count = 0
    drop_last: bool = False
    dropout: Literal["exact", "own"] = "exact"
    device: Literal["auto", "cpu", "gpu"] = "auto"
    patience: Duration = Duration.parse("600 s")

    def __post_init__(self) -> None:
        if self.micro_batches > self.batch:
            raise ValueError(
                f"micro_batches: a batch of {self.batch} cannot be cut into {self.micro_batches}: some would be empty"
            )


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How samples are read: by this process (`num_workers: 0`) or others, how far ahead, how long is too long."""

    num_workers: Count = 0
    prefetch: Positive = 2
    timeout: Duration = Duration.parse("120 s")


CALLBACKS = ("console", "metrics", "dashboard", "evaluate", "checkpoint")
# What a recipe means where it says nothing: filled in before overrides, so that these can be overridden too.
DEFAULTS: dict[str, Any] = {
    "schedule": {"use": "constant", "learning_rate": 1e-3},
    "strategy": {"use": "data_parallel"},
    "callbacks": [{"use": name} for name in CALLBACKS],
}


class Recipe(BaseModel):
    """What to do. `loss: null` asks the model's `loss(outputs, targets)`; `output_dir` is runs/<name> by default."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: Annotated[str, AfterValidator(_file_name)] = "run"
    model: Annotated[Part, OnShelf("models", "model")]
    dataset: Annotated[Part, OnShelf("datasets", "dataset")]
    loss: Annotated[Part, OnShelf("losses", "loss")] | None = None
    optimizer: Annotated[Part, OnShelf("optimizers", "optimizer")]
    schedule: Annotated[Part, OnShelf("schedules", "schedule")]
    strategy: Annotated[Part, OnShelf("strategies", "strategy")]
    train: Train
    loader: LoaderSettings = LoaderSettings()
    callbacks: tuple[Annotated[Part, OnShelf("callbacks", "callbacks")], ...]
    output_dir: str | None = None

    @property
    def folder(self) -> Path:
        """Where the run lives."""
        return Path(self.output_dir).expanduser() if self.output_dir else Path("runs") / self.name
