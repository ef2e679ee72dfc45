"""The recipe as types, whose fields are the YAML keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, model_validator

from paddle_dp.errors import UsageError, near
from paddle_dp.part import Part, adapted, freeze, lazily
from paddle_dp.recipe.precision import Precision, PrecisionSetting
from paddle_dp.recipe.shelf_schema import OnShelf
from paddle_dp.units import Count, Duration, EverySteps, Length, Positive, Probability, Sigmas, check_steps

FLOAT32 = Precision()


def _positive_length(length: Length) -> Length:
    if not length.count:
        raise ValueError(f"'{length}' is no training at all")
    return length


def _file_name(name: str) -> str:
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"'{name}' cannot be the name of a folder")
    return name


DEVICES = ("auto", "cpu", "gpu", "xpu", "npu")


def _device(name: str) -> str:
    """A plugin may bring a device of any name, but one that is nearly a known one is a slip."""
    guess = near(name, DEVICES)
    if name == "cuda":
        guess = "gpu"
    if name not in DEVICES and (guess or not name.isidentifier()):
        known = ", ".join(f"'{one}'" for one in DEVICES)
        hint = f" Did you mean '{guess}'?" if guess else ""
        raise ValueError(f"'{name}' is none of {known}, nor the name of a plugin's device.{hint}")
    return name


@dataclass(frozen=True, kw_only=True)
class Train:
    """How to train. `batch` is the global batch, on any number of ranks; `micro_batches` computes it in parts."""

    length: Annotated[Length, AfterValidator(_positive_length)]
    """How far to train, counted from step 0; a resumed run ends there, too."""

    batch: Positive
    """Samples per update, over **all** ranks: the optimizer sees the same batch on any number of ranks."""

    micro_batches: Positive = 1
    """Parts in which each batch is computed, one after the other, to save memory; the update stays the same."""

    precision: PrecisionSetting = FLOAT32
    """`float32`, `bfloat16`, `float16` or `float64`, or a mapping of `dtype`, `level` and `scale`."""

    seed: Count = 0
    """Seed of weights, order of samples, augmentation and dropout."""

    drop_last: bool = False
    """Whether to leave out the last batch of an epoch if it is short."""

    dropout: Literal["exact", "own"] = "exact"
    """`exact`: the same masks on any number of ranks, in every layout ([dropout.md](dropout.md)). `own`: each rank
    draws its own, by Paddle's kernels (on a GPU the fused ones), and learns something else than one process."""

    compile: bool = False
    """Whether the model's forward is traced into one program (`paddle.jit.to_static`) for training, which CINN compiles
    on GPUs. With the data axis alone, without recompute, and with `dropout: own` where the model drops; every new shape
    of a batch is traced again. On CPUs it is slower ([overhead.md](overhead.md))."""

    device: Annotated[str, AfterValidator(_device)] = "auto"
    """`auto`, `cpu`, `gpu`, `xpu`, `npu`, or another type of device that a plugin of Paddle brings. `auto` takes what
    Paddle sees for each rank: a plugin's device, else a GPU, else the CPU."""

    max_time: Duration | None = None
    """After so long, counted from the start of the process, the training stops with a checkpoint and leaves with 75; to
    be gone on with by `--resume` ([reliability.md](reliability.md))."""

    patience: Duration = Duration.parse("600 s")
    """How long an exchange between ranks on CPUs waits for one that is late, before the job ends. Where `paddle-dp`
    watches all ranks of one machine, at least as long as `watch` allows a rank to be anywhere."""

    def __post_init__(self) -> None:
        if self.micro_batches > self.batch:
            raise ValueError(
                f"micro_batches: a batch of {self.batch} cannot be cut into {self.micro_batches}: some would be empty"
            )


@dataclass(frozen=True, kw_only=True)
class Pad:
    """How an array of unequal lengths is padded, at the end of its first dim."""

    length: Positive
    """What it is padded to, in every sample: so that a sample is the same on any number of ranks."""

    value: float = 0
    """What it is filled with: -100 for targets that a loss ignores."""

    mask: str | None = None
    """The name of a further input, bool [length]: true where the array's own numbers are."""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """How samples are read: by worker processes or in the rank, how far ahead, and with which time limit."""

    num_workers: Count = 0
    """Worker processes of each rank; 0 reads in the rank itself."""

    prefetch: Positive = 2
    """Batches that workers read ahead."""

    timeout: Duration = Duration.parse("120 s")
    """Time that one sample may take before its worker counts as hung."""

    samples: Positive | None = None
    """Of a stream: samples of an epoch. By default all that it has, which are counted at the start."""

    pad: Mapping[str, Pad] = field(default_factory=dict)
    """Arrays of unequal lengths by name, such as ids and labels of dicts, or inputs and targets:
    `{ids: {length: 128, mask: ids_mask}}`."""

    collate: Literal["samples", "batch"] = "samples"
    """What a data set's `collate_fn` is given: `samples`, one at a time, which may not depend on one another; `batch`,
    the whole global batch, which every rank reads then ([add-a-part.md](add-a-part.md))."""


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """For how long nothing may happen on any rank before the job is ended, and the rank named that the others wait for
    ([reliability.md](reliability.md))."""

    patience: Duration | None = None
    """Within a step, and after the last. By default ten times the median step, and 60 s at least."""

    start: Duration = Duration.parse("600 s")
    """Until the first steps are done: Python, the data set, the other nodes."""

    evaluate: Duration = Duration.parse("600 s")
    """In an evaluation, from one batch to the next."""

    checkpoint: Duration = Duration.parse("1800 s")
    """While a checkpoint is written."""

    callbacks: Duration = Duration.parse("1800 s")
    """In any other callback."""

    node: Duration = Duration.parse("20 s")
    """Of several machines: for how long one may not be heard of before it is lost."""

    rejoin: Duration = Duration.parse("300 s")
    """With --restarts: for how long a lost machine is waited for."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """What is done about an update whose numbers are wrong, on all ranks alike ([guard.md](guard.md))."""

    non_finite: Literal["stop", "skip", "rewind"] | None = None
    """What is done, before it changes a weight, about an update whose loss or gradient norm is NaN or infinite. `stop`:
    the training ends with an error. `skip`: the update is not made, and the training goes on. `rewind`: it goes back to
    the last checkpoint, and leaves that batch out from then on. null: numbers are looked at where a callback reads
    them, and end the training."""

    spike: Sigmas | None = None
    """The same is done about a loss that is farther above the mean of the last 100 than so many of their standard
    deviations, such as `5 sigma`."""

    in_a_row: Positive = 10
    """As many batches in a row may be left out; one more ends the training."""

    recompute: EverySteps | None = None
    """How often all data ranks compute the gradients of the same samples and compare them bit by bit, such as `every
    200 steps`: a processor that computes wrong ends the training. With one data rank, twice on the same processor."""

    def __post_init__(self) -> None:
        if self.spike is not None and self.non_finite is None:
            raise ValueError("spike: non_finite says what is done about it, too: stop, skip or rewind")
        check_steps(recompute=self.recompute)


@dataclass(frozen=True, kw_only=True)
class Ema:
    """An average of the weights over time, evaluated and saved beside them ([fine-tuning.md](fine-tuning.md))."""

    decay: Probability = 0.999
    """After each time, average = `decay` × average + (1 - `decay`) × weight."""

    every: EverySteps = EverySteps(1, "steps")
    """How often the weights are taken into the average."""

    warmup: bool = False
    """The n-th time with a decay of (1 + n) / (10 + n), while that is smaller: for short trainings."""

    def __post_init__(self) -> None:
        check_steps(every=self.every)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Weights to begin with, instead of random ones, as in fine-tuning. Optimizer and progress begin anew."""

    path: str
    """A checkpoint of any layout, a run's folder (its newest), RUN/best, RUN/STEP, a folder of Hugging Face's, or a
    file: `.safetensors`, `.pdparams`, `.bin`, `.pt`, `.pth` or `.index.json` ([given-weights.md](given-weights.md))."""

    only: tuple[str, ...] = ()
    """Patterns of the tensors that are meant, such as `backbone.*`, or layers; all by default."""

    rename: dict[str, str] = field(default_factory=dict)
    """Patterns of the source's names to what they are to be, such as `{"encoder.*": "backbone.*"}`; the first that fits
    counts."""

    strict: bool = True
    """Whether all that is meant must be there, fit, and be in the model; `false`: what fits is loaded."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: is empty")
        for pattern, wanted in self.rename.items():
            if pattern.count("*") != wanted.count("*"):
                raise ValueError(f"rename: '{pattern}' and '{wanted}' have unequal numbers of stars")


CALLBACKS = ("console", "metrics", "dashboard", "evaluate", "checkpoint")
# Defaults of whole keys. They are filled in before the overrides, which may change them.
DEFAULTS: dict[str, Any] = {
    "schedule": {"use": "constant", "learning_rate": 1e-3},
    "strategy": {"use": "data_parallel"},
    "callbacks": [{"use": name} for name in CALLBACKS],
}


class Recipe(BaseModel):
    """A recipe. `loss: null` uses the model's `loss(outputs, targets)`; `output_dir` is runs/<name> by default."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    name: Annotated[str, AfterValidator(_file_name)] = "run"
    """The run's name; the file's, without `.yaml`, by default."""

    model: Annotated[Part, OnShelf("models", "model")]
    """The model: a part of `models/`."""

    dataset: Annotated[Part, OnShelf("datasets", "dataset")]
    """The data set: a part."""

    loss: Annotated[Part, OnShelf("losses", "loss")] | None = None
    """The loss: a part. Without one, the model's own method `loss(outputs, targets)`."""

    optimizer: Annotated[Part, OnShelf("optimizers", "optimizer")]
    """The optimizer: a part."""

    schedule: Annotated[Part, OnShelf("schedules", "schedule")]
    """The learning rate over the steps: a part. `{use: constant, learning_rate: 0.001}` by default."""

    strategy: Annotated[Part, OnShelf("strategies", "strategy")]
    """How the model is split over the ranks: a part. `{use: data_parallel}` by default."""

    train: Train
    """Length, batch, precision and seed."""

    loader: LoaderSettings = LoaderSettings()
    """How samples are read."""

    watch: WatchSettings = WatchSettings()
    """When a job that stands still is ended."""

    load: Load | None = None
    """Weights to begin with: `{path: runs/old, only: [backbone.*], strict: false}`; a resumed run has its own."""

    guard: Guard = Guard()
    """What is done about an update whose numbers are wrong."""

    adapter: Annotated[Part, OnShelf("adapters", "adapter")] | None = None
    """Small parameters beside those of the model, which are frozen then: a part. They alone are trained and saved."""

    ema: Ema | None = None
    """An average of the weights: `{decay: 0.999, every: 1 step}`; evaluated as `ema_loss`, `ema_acc1` …."""

    callbacks: tuple[Annotated[Part, OnShelf("callbacks", "callbacks")], ...]
    """A list of parts. console, metrics, dashboard, evaluate and checkpoint by default."""

    output_dir: str | None = None
    """The run's folder; `runs/<name>` by default."""

    @model_validator(mode="after")
    def _groups_fit(self, info: ValidationInfo) -> Recipe:
        """Compares the groups of the optimizer, and the adapter, with the model, where it can be built without
        memory."""
        if (self.optimizer.groups or self.adapter) and (info.context or {}).get("tries", True):
            try:
                with lazily():
                    self.build_model()
            except UsageError:
                raise
            except Exception:  # noqa: BLE001 - a model that cannot be built so: a rank will compare them
                return self
        return self

    def build_model(self) -> Any:
        """The whole model as it is trained: with its adapter, and frozen what that and `optimizer.groups` freeze.
        Raises RecipeError for groups, or an adapter, that do not fit it."""
        model = self.model.build()
        if "optimizer" in self.model_fields_set:  # not in what stands for a script's recipe
            model, before = adapted(model, self.adapter, self.train.seed)
            freeze(model, self.optimizer.groups, before)
        return model

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.output_dir).expanduser() if self.output_dir else Path("runs") / self.name
