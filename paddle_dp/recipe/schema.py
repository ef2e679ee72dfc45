"""The groups of settings of a recipe as types; their fields are the YAML keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
)

from paddle_dp.errors import near
from paddle_dp.part import ErrorContext, Part, read_settings
from paddle_dp.part.config import adapter
from paddle_dp.recipe.shelf_schema import OnShelf
from paddle_dp.units import (
    AboveZero,
    Count,
    Duration,
    EverySteps,
    Fraction,
    Length,
    Positive,
    Probability,
    Sigmas,
    check_steps,
)  # fmt: skip

Dtype = Literal["float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The number formats of a training. float64 applies to everything, with the same initial weights (for proofs; slow
    on a GPU). `level` is O1 (autocast) or O2 (low-precision weights with float32 masters). In a recipe the dtype alone
    is enough: `precision: bfloat16`."""

    dtype: Dtype = "float32"
    """The number format of products and convolutions; of everything if `float64`."""

    level: Literal["O1", "O2"] = "O1"
    """`O1` computes in it where that is safe; `O2` also keeps weights in it."""

    scale: AboveZero = 65536.0
    """The initial loss scale, for float16 only; it then adapts."""

    @property
    def is_low(self) -> bool:
        """True for a dtype of 16 bits, which accelerators compute in and CPUs emulate in float32."""
        return self.dtype in ("bfloat16", "float16")


_PRECISION = ErrorContext(subject="train.precision", prefix="train.precision")


def read_precision(value: Any) -> Precision:
    """Reads a recipe's value, a dtype or a mapping. Raises RecipeError for anything else."""
    if isinstance(value, Precision):
        return value
    return read_settings(Precision, value if isinstance(value, dict) else {"dtype": value}, _PRECISION)


def _written_precision(precision: Precision) -> str | dict[str, Any]:
    """The dtype alone if the other settings are defaults; else a mapping."""
    return precision.dtype if precision == Precision(dtype=precision.dtype) else vars(precision)


_PRECISION_SCHEMA = {"anyOf": [TypeAdapter(Dtype).json_schema(), adapter(Precision).json_schema()]}
PrecisionSetting = Annotated[
    Precision,
    PlainValidator(read_precision),
    PlainSerializer(_written_precision),
    WithJsonSchema(_PRECISION_SCHEMA),
]
FLOAT32 = Precision()


def _positive_length(length: Length) -> Length:
    if not length.count:
        raise ValueError(f"'{length}' is no training")
    return length


DEVICES = ("auto", "cpu", "gpu", "xpu", "npu")


def _device(name: str) -> str:
    """Checks a device's name. Plugins may bring any name, but a name similar to a known one is a typing error."""
    guess = near(name, DEVICES)
    if name == "cuda":
        guess = "gpu"
    if name not in DEVICES and (guess or not name.isidentifier()):
        known = ", ".join(f"'{device}'" for device in DEVICES)
        hint = f" Did you mean '{guess}'?" if guess else ""
        raise ValueError(f"'{name}' is none of {known}, nor the name of a plugin's device.{hint}")
    return name


def _global_number(value: Any) -> Any:
    if isinstance(value, str) and re.fullmatch(r"\s*([0-9]+\s+per\s+rank|auto(\s.*)?)\s*", value):
        raise ValueError(
            f"'{value}' depends on the ranks, which only paddle-dp train, verify and check --ranks and tools/train.py "
            "know. Write the number over all ranks here, or take the run's recipe.yaml, which has it"
        )
    return value


def _or_text(example: str) -> WithJsonSchema:
    """The schema for editors of a number that may be a text like `example`."""
    return WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "examples": [example]}]}
    )


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """A global batch that grows to `train.batch`: Megatron's `--rampup-batch-size`, by updates."""

    start: Positive
    """Samples of the first update, over all ranks; fewer than `train.batch`."""

    increment: Positive
    """By how many samples the batch grows each time; the last time by no more than reaches `train.batch`."""

    every: EverySteps
    """How many updates have the same batch before it grows."""

    def __post_init__(self) -> None:
        check_steps(every=self.every)

    def __str__(self) -> str:
        return f"{{start: {self.start}, increment: {self.increment}, every: {self.every}}}"

    def size(self, update: int, batch: int) -> int:
        """Samples of update number `update`, from 0, in a training that grows to `batch`."""
        return min(batch, self.start + self.increment * (update // int(self.every.count)))


@dataclass(frozen=True, kw_only=True)
class Train:
    """The training. `batch` is the global batch on any number of ranks; `micro_batches` computes it in parts."""

    length: Annotated[Length, AfterValidator(_positive_length)]
    """How far to train, counted from step 0; a resumed run ends there, too."""

    batch: Annotated[Positive, BeforeValidator(_global_number), _or_text("32 per rank")]
    """Samples per update, over **all** ranks: the optimizer sees the same batch on any number of ranks. `32 per rank`
    (of the data axis) is resolved when a training begins: the run's recipe has the number over all."""

    batch_ramp: BatchRamp | None = None
    """Begin with smaller batches: `{start: 64, increment: 64, every: 100 steps}` takes 64 samples in each of the first
    100 updates, 128 in the next, up to `batch`. Schedules stay functions of the update, and take their lengths in
    steps."""

    micro_batches: Annotated[Positive, BeforeValidator(_global_number), _or_text("auto")] = 1
    """Number of parts in which each batch is computed, one after the other, to save memory; the update stays the same,
    except that BatchNorm takes the statistics of each part. `auto`, or `auto 16 GB`: the smallest number with which a
    transformer fits into a rank's memory, as `paddle-dp check` computes it."""

    precision: PrecisionSetting = FLOAT32
    """`float32`, `bfloat16`, `float16` or `float64`, or a mapping of `dtype`, `level` and `scale`."""

    seed: Count = 0
    """Seed of weights, order of samples, augmentation and dropout."""

    drop_last: bool = False
    """Leave out the last batch of an epoch if it is short."""

    dropout: Literal["exact", "own"] = "exact"
    """`exact`: the same masks on any number of ranks, in every layout ([dropout.md](dropout.md)). `own`: each rank
    draws separate masks with Paddle's kernels (on a GPU the fused ones), so the weights differ from one process."""

    compile: bool = False
    """Trace the model's forward into one program (`paddle.jit.to_static`) for training, which CINN compiles on GPUs.
    This needs the data axis alone, no recompute, and `dropout: own` if the model drops. Every new shape of a batch is
    traced again. On CPUs it is slower ([overhead.md](overhead.md))."""

    device: Annotated[str, AfterValidator(_device)] = "auto"
    """`auto`, `cpu`, `gpu`, `xpu`, `npu`, or another type of device that a plugin of Paddle brings. `auto` takes the
    first that Paddle sees on each rank: a plugin's device, a GPU, the CPU."""

    max_time: Duration | None = None
    """Time since the start of the process after which the training saves a checkpoint and exits with status 75;
    `--resume` continues it ([reliability.md](reliability.md))."""

    patience: Duration = Duration.parse("600 s")
    """How long an exchange between ranks on CPUs waits for a late rank before the job ends. If `paddle-dp` watches all
    ranks of one machine, it waits at least as long as the longest limit of `watch`."""

    def __post_init__(self) -> None:
        if self.micro_batches > self.batch:
            raise ValueError(
                f"micro_batches: a batch of {self.batch} cannot be cut into {self.micro_batches}: some would be empty"
            )
        if (ramp := self.batch_ramp) is None:
            return
        if ramp.start >= self.batch:
            raise ValueError(
                f"batch_ramp: it begins with {ramp.start} samples, and batch is {self.batch}: begin with fewer, or "
                "leave it out"
            )
        if self.micro_batches > ramp.start:
            raise ValueError(
                f"micro_batches: the first batches, of {ramp.start} samples (batch_ramp.start), cannot be cut into "
                f"{self.micro_batches}: some would be empty"
            )


def refuse_epochs(schedule: Any) -> None:
    """Raises ValueError for a schedule with a length in epochs, but for how often it evaluates."""
    for name, value in vars(schedule).items():
        for length in value if isinstance(value, tuple) else (value,):
            if type(length) is Length and length.unit == "epochs" and length.count:
                raise ValueError(
                    f"schedule.{name}: '{length}' has no fixed number of updates while the batch grows "
                    "(train.batch_ramp): write it in steps"
                )


@dataclass(frozen=True, kw_only=True)
class Pad:
    """The padding of an array of unequal lengths, at the end of its first dim."""

    length: Positive
    """The length after padding, equal in every sample, so that a sample is the same on any number of ranks."""

    value: float = 0
    """The fill value: -100 for targets that a loss ignores."""

    mask: str | None = None
    """The name of an additional input, bool [length]: false for the padding."""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """The reading of samples: worker processes, prefetch, time limit, padding and collating."""

    num_workers: Count = 0
    """Worker processes of each rank; 0 reads in the rank itself."""

    prefetch: Positive = 2
    """Batches that workers read ahead."""

    timeout: Duration = Duration.parse("120 s")
    """Time that one sample may take before its worker counts as hung."""

    samples: Positive | None = None
    """The samples of a stream's epoch. By default all its samples, which are counted at the start."""

    pad: Mapping[str, Pad] = field(default_factory=dict)
    """Arrays of unequal lengths by name, such as ids and labels of dicts, or inputs and targets:
    `{ids: {length: 128, mask: ids_mask}}`."""

    collate: Literal["samples", "batch"] = "samples"
    """The input of a data set's `collate_fn`. `samples`: one at a time, so a result must not depend on other samples.
    `batch`: the whole global batch, which every rank then reads ([add-a-part.md](add-a-part.md))."""


@dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Limits of the time without progress on any rank. After it, the job ends and names the rank that the others wait
    for ([reliability.md](reliability.md))."""

    patience: Duration | None = None
    """Limit within a step, after the last one, and of a rank that a signal has stopped. By default ten times the median
    step, and 60 s at least."""

    start: Duration = Duration.parse("600 s")
    """Limit until the first steps are done: Python, the data set, the other nodes."""

    evaluate: Duration = Duration.parse("600 s")
    """Limit from one batch of an evaluation to the next."""

    checkpoint: Duration = Duration.parse("1800 s")
    """Limit while a checkpoint is written."""

    callbacks: Duration = Duration.parse("1800 s")
    """Limit in any other callback."""

    node: Duration = Duration.parse("20 s")
    """Limit after which a machine that sends nothing is lost, with several machines."""

    rejoin: Duration = Duration.parse("300 s")
    """Limit of waiting for a lost machine, with --restarts."""


@dataclass(frozen=True, kw_only=True)
class Guard:
    """The reaction to an update with wrong numbers, the same on all ranks ([guard.md](guard.md))."""

    non_finite: Literal["stop", "skip", "rewind"] | None = None
    """The reaction to a loss or gradient norm that is NaN or infinite, before it changes a weight. `stop`: the training
    ends with an error. `skip`: the update is not made, and the training continues. `rewind`: the training returns to
    the last checkpoint and leaves that batch out from then on. null: numbers are checked only where a callback reads
    them, and end the training."""

    spike: Sigmas | None = None
    """The same reaction to a loss that exceeds the mean of the last 100 by more than so many of their standard
    deviations, such as `5 sigma`."""

    in_a_row: Positive = 10
    """The number of batches in a row that may be left out; one more ends the training."""

    recompute: EverySteps | None = None
    """How often all data ranks compute the gradients of the same samples and compare them bitwise, such as `every 200
    steps`: a processor that computes wrong ends the training. With one data rank, the same processor computes twice."""

    def __post_init__(self) -> None:
        if self.spike is not None and self.non_finite is None:
            raise ValueError(
                "spike: needs non_finite, which is the reaction to it, too: stop, skip or rewind"
            )
        check_steps(recompute=self.recompute)


@dataclass(frozen=True, kw_only=True)
class Ema:
    """An average of the weights over time, evaluated and saved in addition to them
    ([fine-tuning.md](fine-tuning.md))."""

    decay: Probability = 0.999
    """Each time, average = `decay` × average + (1 - `decay`) × weight."""

    every: EverySteps = EverySteps(1, "steps")
    """How often the weights enter the average."""

    warmup: bool = False
    """Use a decay of (1 + n) / (10 + n) at the n-th time, while that is smaller: for short trainings."""

    def __post_init__(self) -> None:
        check_steps(every=self.every)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """How held-out samples are evaluated: each one once by default, a training's batch at a time."""

    batch: Positive | None = None
    """Samples that are computed at a time, over all ranks; by default `train.batch`. An evaluation keeps no activations
    for a backward, and is not cut into `train.micro_batches`."""

    samples: Positive | None = None
    """Evaluate so many, at equal distances in the data set and the same ones each time; by default all."""


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Mixup and CutMix of training images: each is mixed with the one before it in the global batch, so the samples are
    the same on any number of ranks ([augmentation.md](augmentation.md))."""

    mixup: AboveZero | None = None
    """Mixup: the whole images are blended. Both parameters of the Beta distribution of the share, such as 0.2."""

    cutmix: AboveZero | None = None
    """CutMix: a rectangle of the other image is pasted. Both parameters of the share's Beta distribution, such as 1."""

    probability: Fraction = 1.0
    """Probability that a global batch is mixed."""

    cutmix_probability: Probability = 0.5
    """Probability that CutMix mixes a batch, and not Mixup, where both are set."""

    def __post_init__(self) -> None:
        if self.mixup is None and self.cutmix is None:
            raise ValueError(
                "mix: neither mixup nor cutmix is set: mix: {mixup: 0.2}, or {cutmix: 1.0}, or both"
            )


@dataclass(frozen=True, kw_only=True)
class Load:
    """Initial weights instead of random ones, as in fine-tuning. Optimizer and progress start anew."""

    path: str
    """A checkpoint of any layout, a run's folder (its newest), RUN/best, RUN/STEP, a Hugging Face folder, or a file:
    `.safetensors`, `.pdparams`, `.bin`, `.pt`, `.pth` or `.index.json` ([given-weights.md](given-weights.md))."""

    only: tuple[str, ...] = ()
    """Patterns of the tensors to load, such as `backbone.*`, or layers; all by default."""

    rename: dict[str, str] = field(default_factory=dict)
    """Patterns of the source's names to their new names, such as `{"encoder.*": "backbone.*"}`; the first match
    counts."""

    strict: bool = True
    """All selected tensors must be in the source and in the model, with the same shape; `false` loads those that
    fit."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path: is empty")
        for pattern, replacement in self.rename.items():
            if pattern.count("*") != replacement.count("*"):
                raise ValueError(f"rename: '{pattern}' and '{replacement}' have unequal numbers of stars")


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class TurnSettings:
    """One of the turns in which a global batch trains the model: some of its parameters, by a loss that they have
    alone, as a GAN's discriminator and generator ([turns.md](turns.md))."""

    match: Annotated[tuple[str, ...], BeforeValidator(_listed)]
    """Patterns of the parameters that this turn trains, such as `discriminator.*`, or layers. Each trained parameter is
    in one turn. The others are fixed meanwhile."""

    loss: Annotated[Part, OnShelf("losses")] | None = None
    """The loss: a part. Without one, the model's method `<turn>_loss(outputs, targets)`."""

    optimizer: Annotated[Part, OnShelf("optimizers")] | None = None
    """The optimizer of its parameters: a part. Without one, the recipe's. The schedule's rate is for all;
    `optimizer.groups` of the recipe changes it for some."""

    every: EverySteps = EverySteps(1, "steps")
    """How often it has its turn: `every: 5 steps` leaves the turn out of four batches of five."""

    def __post_init__(self) -> None:
        check_steps(every=self.every)
        if not self.match:
            raise ValueError("match: is empty, so that nothing is trained")
        if self.optimizer is not None and (
            self.optimizer.groups or hasattr(self.optimizer.config, "prepare")
        ):
            given = "groups" if self.optimizer.groups else self.optimizer.name
            raise ValueError(
                f"optimizer: {given} acts on the whole model: set it in the recipe's own optimizer"
            )


CALLBACKS = ("console", "metrics", "dashboard", "evaluate", "checkpoint")
# Defaults of whole keys, filled in before the overrides, which may change them.
DEFAULTS: dict[str, Any] = {
    "schedule": {"use": "constant", "learning_rate": 1e-3},
    "strategy": {"use": "data_parallel"},
    "callbacks": [{"use": name} for name in CALLBACKS],
}
