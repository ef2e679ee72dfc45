"""Checks whether a layout fits a model, its micro-batches and a number of ranks, and proposes the nearest that do."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from paddle_dp.mesh.degrees import AXES, Degrees
from paddle_dp.plan.pipeline_schedule import (
    Partition,
    check_partition,
    check_schedule,
    stage_bounds,
    unlearning,
)
from paddle_dp.text import plural


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The ways in which a model can be split, according to its tables.

    `blocks`: the number of ordered blocks; `sizes`: the elements of each block's parameters; `learns`: the number of
    trained parameters of each (of the whole model, if there are no blocks or they are not all of it); `outside`: a
    parameter in no block, or "". `cut`: the entries of its `cuts` tables, with the size that the tensor axis must
    divide; `cut_classes`: logits are among them. `attention_methods`: it names its attention. `tied`: groups of blocks,
    by number, that share a weight.
    """

    blocks: int = 0
    sizes: tuple[int, ...] = ()
    learns: tuple[int, ...] = ()
    outside: str = ""
    cut: tuple[tuple[str, int], ...] = ()
    cut_classes: bool = False
    attention_methods: bool = False
    tied: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that a layout must divide: the model's (0: it has none), and the number of micro-batches. The global
    `batch` it need not divide: shares may be unequal.

    `anatomy` is None if only a rank can build the model, which is then not checked here. `partition` deals blocks to
    stages, a rank has `virtual_stages` of these, and `pipeline_schedule` orders its micro-batches. `cut_lengths`: the
    tensor axis splits sequences, too. `partial_loss`: the loss can be computed from some of the classes, or the tokens.
    """

    heads: int = 0
    kv_heads: int = 0
    hidden: int = 0
    vocab: int = 0
    classes: int = 0
    length: int = 0
    cut_lengths: bool = False
    partial_loss: bool = True
    anatomy: Anatomy | None = None
    batch: int = 1
    micro_batches: int = 1
    virtual_stages: int = 1
    pipeline_schedule: str = "1f1b"
    partition: Partition = "uniform"

    @classmethod
    def from_config(cls, model: Any, batch: int, micro_batches: int, anatomy: Anatomy | None = None) -> Shape:
        """The shape of a model's Config, from its settings `heads`, `kv_heads`, `vocab`, …, if it has them."""
        known = {name: getattr(model, name, 0) for name in ("heads", "kv_heads", "hidden", "vocab", "length")}
        sizes: dict[str, Any] = {name: size for name, size in known.items() if isinstance(size, int)}
        if getattr(model, "cuts_classes", False):
            sizes["classes"] = model.classes
        return cls(**sizes, batch=batch, micro_batches=micro_batches, anatomy=anatomy)

    def along(self, dataset: Any, cut_lengths: bool) -> Shape:
        """This shape with the sequence length of a data set's Config, if it has one."""
        return replace(self, length=sample_length(self, dataset), cut_lengths=cut_lengths)


def sample_length(model: Any, dataset: Any) -> int:
    """The tokens of a sample: the `length` of the data set's Config, or else of the model's; 0 if neither has one."""
    lengths = (getattr(config, "length", 0) for config in (dataset, model))
    return next((length for length in lengths if isinstance(length, int) and length), 0)


def problems(degrees: Degrees, shape: Shape, ranks: int) -> list[str]:
    """The reasons why the layout cannot run, one sentence each."""
    reasons = []
    if degrees.ranks != ranks:
        factors = [str(degrees[axis]) for axis in degrees.split_axes]
        product = f"{' × '.join(factors)} = " if len(factors) > 1 else ""
        needed = f"{product}{plural(degrees.ranks, 'rank')}"
        reasons.append(f"the degrees make {needed}, and there are {ranks}")
    heads = {"heads": shape.heads, "kv_heads": shape.kv_heads}
    divided = {
        "tensor": {**heads, "hidden": shape.hidden, "vocab": shape.vocab, "classes": shape.classes},
        "sequence": {**heads, "length": shape.length},
    }
    for axis, sizes in divided.items():
        for name, size in sizes.items():
            if size and size % degrees[axis]:
                owner = "the" if name == "length" else "the model's"
                reasons.append(f"{axis} {degrees[axis]} does not divide {owner} {name} ({size})")
    reasons += _uneven(degrees, shape)
    if degrees.pipeline > 1:
        reasons += check_schedule(
            shape.pipeline_schedule, degrees.pipeline, shape.micro_batches, shape.virtual_stages
        )
    if shape.anatomy is not None:
        named = any(sentence.startswith("tensor") for sentence in reasons)
        reasons += _unsplittable(degrees, shape, shape.anatomy, named)
    return reasons


def _unsplittable(degrees: Degrees, shape: Shape, model: Anatomy, named: bool) -> Iterator[str]:
    """Reasons from the model's tables; `named`: another reason names the tensor axis."""
    if degrees.pipeline > 1:
        yield from _unstageable(degrees, shape, model)
    if degrees.tensor > 1:
        yield from _uncuttable(degrees.tensor, shape, model, named)
    if degrees.sequence > 1 and not (model.attention_methods and model.blocks):
        yield f"sequence {degrees.sequence} needs a model with `blocks` that names its attention in `attention_methods`"
    elif degrees.sequence > 1 and not shape.partial_loss:
        yield f"sequence {degrees.sequence} needs a loss of each token, which this one is not"


def _unstageable(degrees: Degrees, shape: Shape, model: Anatomy) -> Iterator[str]:
    pipeline, stages = degrees.pipeline, degrees.pipeline * shape.virtual_stages
    if not model.blocks:
        yield f"pipeline {pipeline} needs a model with ordered `blocks`, and this one names none"
    elif model.outside:
        yield f"pipeline {pipeline} needs all of a model in its `blocks`, and '{model.outside}' is in none"
    elif wrong := check_partition(shape.partition, model.blocks, stages):
        yield from wrong
    else:
        bounds = stage_bounds(model.sizes or (1,) * model.blocks, stages, shape.partition)
        yield from unlearning(bounds, pipeline, model.learns or (1,) * model.blocks)
        on = [{(bisect_right(bounds, n) - 1) % pipeline for n in blocks} for blocks in model.tied]
        if degrees.sharding > 1 and any(len(ranks) > 1 for ranks in on):
            yield (
                f"sharding {degrees.sharding} would give a weight that stages of the pipeline share (tied) an owner on "
                "each of them"
            )


def _uncuttable(tensor: int, shape: Shape, model: Anatomy, named: bool) -> Iterator[str]:
    uneven = [(name, size) for name, size in model.cut if size % tensor]
    if not model.cut:
        yield f"tensor {tensor} needs a model with `cuts` tables, and this one has none"
    elif model.cut_classes and not shape.partial_loss:
        yield f"tensor {tensor} cuts the classes of the scores, which this loss needs whole: it has no `parallel`"
    if uneven and not named:
        yield f"tensor {tensor} does not divide {uneven[0][0]} ({uneven[0][1]})"
    if shape.cut_lengths and model.blocks < 2:
        yield "sequence_parallel needs a model with ordered `blocks`, between which sequences are dealt out"


def _uneven(degrees: Degrees, shape: Shape) -> Iterator[str]:
    """Sizes that tensor and sequence cannot divide together, though each of them can; and a missing length."""
    sequence, tensor = degrees.sequence, degrees.tensor
    product = f"sequence {sequence} × tensor {tensor}" if sequence > 1 else f"tensor {tensor}"
    if sequence > 1 and not shape.length:
        yield f"sequence {sequence} needs a model or a data set with a `length`"
    for name, size in (("heads", shape.heads), ("kv_heads", shape.kv_heads)):
        if size % (sequence * tensor) and not (size % sequence or size % tensor):
            yield f"{product} does not divide the model's {name} ({size})"
    if shape.cut_lengths and shape.length % (sequence * tensor) and not shape.length % sequence:
        yield f"{product} does not divide the length ({shape.length}), which sequence_parallel cuts"


def layouts(ranks: int) -> Iterator[Degrees]:
    for sizes in _factors(ranks, len(AXES)):
        yield Degrees(**dict(zip(AXES, sizes, strict=True)))


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All tuples of `count` factors of the number, in order."""
    if count == 1:
        yield (number,)
        return
    for first in (n for n in range(1, number + 1) if number % n == 0):
        yield from ((first, *others) for others in _factors(number // first, count - 1))


def legal_layouts(shape: Shape, ranks: int, near: Degrees | None = None) -> list[Degrees]:
    """The layouts that can run, nearest to `near` first: by the number of axes changed, then the size of changes."""

    def distance(degrees: Degrees) -> tuple[int, float]:
        if near is None:
            return (0, 0.0)
        ratios = [max(degrees[a], near[a]) / min(degrees[a], near[a]) for a in AXES if a != "data"]
        return (sum(ratio > 1 for ratio in ratios), sum(ratios))

    return sorted((d for d in layouts(ranks) if not problems(d, shape, ranks)), key=distance)


def layout_error(degrees: Degrees, shape: Shape, ranks: int) -> str | None:
    """One sentence on why the layout cannot run and which near ones can; None if it can."""
    reasons = problems(degrees, shape, ranks)
    if not reasons:
        return None
    near = "; ".join(str(layout) for layout in legal_layouts(shape, ranks, degrees)[:3])
    legal = f"Legal on {plural(ranks, 'rank')}, nearest first: {near}."
    return f"strategy: {'; '.join(reasons)}. {legal if near else f'No layout of {ranks} ranks fits.'}"
