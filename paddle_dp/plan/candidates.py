"""All layouts of a number of ranks that a model, a batch and its tables allow, and their workloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import pairwise

import numpy as np

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.activations import ActivationFormat
from paddle_dp.plan.devices import Device
from paddle_dp.plan.layout import Layout, ReduceDtype
from paddle_dp.plan.legal import Shape, layouts, problems
from paddle_dp.plan.memory import Widths
from paddle_dp.plan.pipeline_schedule import Schedule, stage_bounds
from paddle_dp.plan.transformer import Transformer
from paddle_dp.plan.workload import Workload, device_columns
from paddle_dp.units import Recompute

VIRTUAL_STAGES = (1, 2, 4)
MOST_SAMPLES = 64  # in a micro-batch: more fill no kernel better
_CAST = 6.0  # bytes: a float32 weight is read and its 16 bits are written, for each use (autocast, level O1)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout: the degrees, samples in a micro-batch of one rank, micro-batches, and the other settings.

    `stage`: of sharding; 0 if nothing is sharded.
    """

    degrees: Degrees
    micro: int
    micro_batches: int
    stage: int = 0
    virtual_stages: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = field(default_factory=Recompute)

    @property
    def schedule(self) -> Schedule:
        return "interleaved" if self.virtual_stages > 1 else "1f1b"

    @property
    def family(self) -> tuple[int, ...]:
        """The name of a layout for a person: its degrees, with or without sharding of a stage."""
        degrees = self.degrees
        return (degrees.tensor, degrees.pipeline, degrees.sequence, self.stage, self.virtual_stages)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Smaller for a plainer layout: by its number of axes, virtual stages, and stage of sharding."""
        return (len(self.axes), self.virtual_stages, self.stage)

    @property
    def axes(self) -> tuple[str, ...]:
        return self.degrees.split_axes

    def layout(self, numerics: Numerics) -> Layout:
        """The layout for the arithmetic of bytes."""
        return Layout(
            degrees=self.degrees, virtual_stages=self.virtual_stages, pipeline_schedule=self.schedule,
            sharding_stage=max(self.stage, 1), sequence_parallel=self.sequence_parallel, recompute=self.recompute,
            widths=numerics.widths, reduce_dtype=numerics.reduce_dtype, accelerator=numerics.accelerator,
        )  # fmt: skip

    def settings(self) -> dict[str, str]:
        """The recipe's keys that make this layout: hybrid's."""
        return {
            "strategy.data": "auto", "strategy.tensor": str(self.degrees.tensor),
            "strategy.pipeline": str(self.degrees.pipeline), "strategy.sharding": str(self.degrees.sharding),
            "strategy.sequence": str(self.degrees.sequence), "strategy.sharding_stage": str(max(self.stage, 1)),
            "strategy.sequence_parallel": str(self.sequence_parallel).lower(),
            "strategy.pipeline_schedule": self.schedule, "strategy.partition": "uniform",
            "strategy.virtual_stages": str(self.virtual_stages) if self.virtual_stages > 1 else "auto",
            "strategy.recompute": str(self.recompute), "train.micro_batches": str(self.micro_batches),
        }  # fmt: skip

    def __str__(self) -> str:
        stage = f"sharding {self.degrees.sharding} (stage {self.stage})"
        text = str(self.degrees).replace(f"sharding {self.degrees.sharding}", stage)
        return text + (f", {self.virtual_stages} stages a rank" if self.virtual_stages > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """A recipe's number formats and kernels, as a plan needs them.

    `low`: products in 16 bits. `widths`: bytes of weights, gradients and states. `reduce_dtype`: of gradients on their
    way, as Layout's. `flash`: attention keeps no scores. `accelerator`: as the device's. `masked`: samples are packed
    documents. `update_flops`: of float32 products in an update of one block, of a traced model in the whole.
    `sync_norms`: BatchNorms take the statistics of all ranks.
    """

    low: bool
    widths: Widths
    flash: bool
    reduce_dtype: ReduceDtype | None = None
    accelerator: bool = True
    masked: bool = False
    update_flops: float = 0.0
    sync_norms: bool = False

    @property
    def number(self) -> int:
        """Bytes of one activation."""
        return 2 if self.low else 4

    @property
    def gradient(self) -> int:
        """Bytes per element of a gradient on its way."""
        plain = Layout(degrees=Degrees(), widths=self.widths, reduce_dtype=self.reduce_dtype)
        return plain.gradient_on_its_way

    @property
    def activation_format(self) -> ActivationFormat:
        names = ("number", "flash", "masked", "sync_norms")
        return ActivationFormat(**{name: getattr(self, name) for name in names})


def candidates(
    shape: Shape,
    ranks: int,
    flash: bool,
    tied: bool = False,
    elementwise: bool = True,
    most_samples: int = MOST_SAMPLES,
) -> Iterator[Candidate]:
    """Every layout of `ranks` ranks that can run. Micro-batches have 1, 2, 4 …
    `most_samples` a rank, and divide the batch; tensor ranks also split the tokens between cut layers, where these are
    divisible. `tied`: a weight is shared by the ends of the model, which sharding in a pipeline refuses. Without an
    `elementwise` optimizer no tensor is cut."""
    recomputes = recompute_choices(shape, flash)
    for degrees in (degrees for degrees in layouts(ranks) if elementwise or degrees.tensor == 1):
        if shape.batch % degrees.dp_size or (tied and degrees.sharding > 1 and degrees.pipeline > 1):
            continue
        samples = shape.batch // degrees.dp_size
        for stages in VIRTUAL_STAGES if degrees.pipeline > 1 else (1,):
            along = degrees.tensor > 1 and not _problems(degrees, shape, ranks, stages, along=True)
            if not along and _problems(degrees, shape, ranks, stages, along=False):
                continue
            for micro in micro_sizes(samples, most_samples):
                micro_batches = samples // micro
                if stages > 1 and micro_batches % degrees.pipeline:
                    continue
                for stage in (1, 2, 3) if degrees.sharding > 1 else (0,):
                    for recompute in recomputes:
                        yield Candidate(
                            degrees=degrees, micro=micro, micro_batches=micro_batches, stage=stage,
                            virtual_stages=stages, sequence_parallel=along, recompute=recompute,
                        )  # fmt: skip


def _problems(degrees: Degrees, shape: Shape, ranks: int, stages: int, along: bool) -> list[str]:
    """The reasons against the degrees with so many stages on a rank. As many micro-batches as stages are assumed: their
    number is chosen later."""
    schedule: Schedule = "interleaved" if stages > 1 else "1f1b"
    fitted = replace(
        shape, virtual_stages=stages, pipeline_schedule=schedule, micro_batches=degrees.pipeline, cut_lengths=along,
        partition="uniform",
    )  # fmt: skip
    return problems(degrees, fitted, ranks)


def micro_sizes(samples: int, most: int = MOST_SAMPLES) -> list[int]:
    """The sizes of a micro-batch that divide a rank's samples: powers of 2, and all of them if they are few."""
    powers = [2**n for n in range(most.bit_length()) if samples % 2**n == 0]
    return sorted({*powers, *([samples] if samples <= most else [])})


def recompute_choices(shape: Shape, flash: bool) -> list[Recompute]:
    """The choices of recompute: blocks, if the model has them; scores, unless flash attention keeps none."""
    settings = ["none"]
    if shape.anatomy is not None and shape.anatomy.blocks:
        settings += ["every 2 blocks", "full"]
        settings += ["selective"] if shape.anatomy.attention_methods and not flash else []
    return [Recompute.parse(setting) for setting in settings]


def workload_of(
    model: Transformer, choices: Sequence[Candidate], device: Device, numerics: Numerics
) -> Workload:
    """The workload of these layouts on a device: this package's, which exchanges gradients during the last backward on
    accelerators, and hands over a pipeline's activations between two pieces of work."""
    degrees = [choice.degrees for choice in choices]
    pipeline = np.array([d.pipeline for d in degrees], float)
    fullest = [depths(model.depth, c.degrees.pipeline, c.virtual_stages) for c in choices]
    full, last = np.array(fullest, float).T
    o1 = numerics.low and numerics.widths.parameter == 4
    columns = {
        "tensor": [d.tensor for d in degrees], "pipeline": pipeline, "data": [d.dp_size for d in degrees],
        "sequence": [d.sequence for d in degrees], "sharded": [d.sharding for d in degrees],
        "stage": [c.stage for c in choices], "virtual_stages": [c.virtual_stages for c in choices],
        "full_depth": full, "last_depth": last,
        "tables": np.where(pipeline > 1, 1, model.tables),
        "micro": [c.micro for c in choices], "micros": [c.micro_batches for c in choices],
        "sequence_parallel": [c.sequence_parallel for c in choices],
        "recomputed_blocks": [1 / c.recompute.blocks if c.recompute.blocks else 0 for c in choices],
        "recomputed_scores": [c.recompute.attention for c in choices],
    }  # fmt: skip
    constants: dict[str, float] = model.columns() | device_columns(device, numerics.low)
    constants |= {
        "ulysses": 1, "flash": numerics.flash, "masked": numerics.masked or not model.causal, "fp8": 0,
        "overlaps_data": 1, "overlaps_stages": 0, "data_outside": 1, "recomputed_products": 0,
        "number": numerics.number, "gradient": numerics.gradient, "parameter": numerics.widths.parameter,
        "cast": _CAST if o1 else 0.0, "update_products": numerics.update_flops * constants["peak"] / device.peak32,
    }  # fmt: skip
    filled = {name: np.full(len(choices), float(number)) for name, number in constants.items()}
    filled |= {name: np.asarray(column, float) for name, column in columns.items()}
    return Workload(**{f.name: filled[f.name] for f in fields(Workload)})


@cache
def depths(depth: int, pipeline: int, stages: int) -> tuple[int, int]:
    """The transformer blocks on the rank with most of them, and on the one with the head, of a uniform partition of
    `depth` blocks between an embedding and a head."""
    bounds = stage_bounds((1,) * (depth + 2), pipeline * stages)
    counts = [0] * pipeline
    for virtual_stage, (first, end) in enumerate(pairwise(bounds)):
        counts[virtual_stage % pipeline] += sum(0 < number <= depth for number in range(first, end))
    return max(counts), counts[-1]
