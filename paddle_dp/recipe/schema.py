"""The groups of settings of a recipe as types, but for `train`; their fields are the YAML keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from paddle_dp.part import Part
from paddle_dp.recipe.shelf_schema import OnShelf
from paddle_dp.units import (
    AboveZero,
    Count,
    Duration,
    EverySteps,
    Fraction,
    Positive,
    Probability,
    Sigmas,
    check_steps,
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
    """The samples of a stream's epoch; refused for other data. By default all, which are counted at the start."""

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
        optimizer = self.optimizer
        if optimizer is not None and (optimizer.groups or hasattr(optimizer.config, "prepare")):
            named = "groups" if optimizer.groups else optimizer.name
            raise ValueError(
                f"optimizer: {named} acts on the whole model: set it in the recipe's own optimizer"
            )


CALLBACKS = ("console", "metrics", "dashboard", "evaluate", "checkpoint")
# Defaults of whole keys, filled in before the overrides, which may change them.
DEFAULTS: dict[str, Any] = {
    "schedule": {"use": "constant", "learning_rate": 1e-3},
    "strategy": {"use": "data_parallel"},
    "callbacks": [{"use": name} for name in CALLBACKS],
}
