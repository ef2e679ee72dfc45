"""The settings `train` of a recipe as a type, with its number formats and its growing batch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Le
from pydantic import (
    AfterValidator,
    BeforeValidator,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
)

from paddle_dp.errors import near
from paddle_dp.part import ErrorContext, read_settings
from paddle_dp.part.config import adapter
from paddle_dp.units import AboveZero, Count, Duration, EverySteps, Length, Positive, check_steps

Dtype = Literal["float32", "float64", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The number formats of a training. float64 applies to everything, with the same initial weights (for proofs; slow
    on a GPU). `level` is O1 (autocast) or O2 (low-precision weights with float32 masters). In a recipe the dtype alone
    is enough: `precision: bfloat16`."""

    dtype: Dtype = "float32"
    """The number format of products and convolutions; of everything if `float64`."""

    level: Literal["O1", "O2"] = "O1"
    """`O1` computes in it where that is safe; `O2` also keeps weights in it, but on CPUs in float32."""

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
            f"'{value}' depends on the ranks, which only paddle-dp train, verify, check --ranks, sweep, cluster, "
            "RayJob and tools/train.py know. Write a number over all ranks, or take a run's recipe.yaml, which has it"
        )
    return value


def _or_text(example: str) -> WithJsonSchema:
    """The schema for editors of a number that may be a text like `example`."""
    text = {"type": "string", "examples": [example]}
    return WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, text]})


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
    model without BatchNorm fits into a rank's memory, as `paddle-dp check` computes it."""

    precision: PrecisionSetting = FLOAT32
    """`float32`, `bfloat16`, `float16` or `float64`, or a mapping of `dtype`, `level` and `scale`."""

    seed: Annotated[Count, Le(2**63 - 1)] = 0  # VisualDL takes no larger one
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
