"""Reads a model's sizes without allocating its weights, and builds one rank's part of it without other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import paddle
from paddle import nn

from paddle_dp.axes.tensor.convolutions import INPUTS, channels_of, has_channels
from paddle_dp.axes.tensor.layers import TensorParallelizer
from paddle_dp.core import lora
from paddle_dp.core.batch_norm import statistics
from paddle_dp.core.blocks import blocks_of, learns_of, outside, sizes_of
from paddle_dp.core.placement import Placements
from paddle_dp.errors import UsageError
from paddle_dp.gloo.fake_group import alone
from paddle_dp.model.initial_weights import draw, initial_weights, without_memory
from paddle_dp.part import lazily
from paddle_dp.part.annotation import attention_methods_of, cut_entries
from paddle_dp.plan import Anatomy
from paddle_dp.plan.layout import Weight

UNCUT_PARAMETERS: dict[str, tuple[str, ...]] = {
    "rowwise": ("bias", lora.B)
}  # parameters that a cut leaves whole
UNCUT_WAY = "per_head"  # leaves all of them whole


def anatomy(model: nn.Layer) -> Anatomy:
    """The sizes of a model that a layout must divide; the model needs no memory for its weights."""
    blocks = blocks_of(model)
    left = outside(model, blocks) if blocks else []
    parents = list(model.named_sublayers(include_self=True))
    return Anatomy(
        blocks=len(blocks),
        sizes=sizes_of(blocks),
        learns=learns_of(units(model)),
        outside=left[0] if left else "",
        cut=tuple(_sizes(parents)),
        cut_classes=any(_cuts_classes(parent) for _, parent in parents),
        attention_methods=any(attention_methods_of(layer) for _, layer in parents),
        tied=_tied(blocks),
    )


def size_of(build: Callable[[], nn.Layer]) -> int | None:
    """The number of elements in a model's parameters; None if LazyGuard cannot build it."""
    try:
        with lazily():
            return sum(int(parameter.size) for parameter in build().parameters())
    except Exception:  # noqa: BLE001 - a model that LazyGuard cannot build may still be built in a rank
        return None


def _cuts_classes(parent: nn.Layer) -> bool:
    """Whether the layer's `cuts` table cuts scores by classes; cutting an embedding by vocabulary does not."""
    return any(
        cut.way == "classes" or (cut.way == "vocab" and not isinstance(cut.value, nn.Embedding))
        for cut in cut_entries(parent)
    )


def _tied(blocks: Iterable[nn.Layer]) -> tuple[tuple[int, ...], ...]:
    """The numbers of blocks that share a weight; each such set once."""
    users: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            users.setdefault(id(parameter), []).append(number)
    return tuple(dict.fromkeys(tuple(numbers) for numbers in users.values() if len(numbers) > 1))


def _sizes(parents: Iterable[tuple[str, nn.Layer]]) -> Iterable[tuple[str, int]]:
    """Sizes that the tensor axis must divide: a cut layer's outputs, inputs or words, or a number that counts them."""
    for prefix, parent in parents:
        for cut in cut_entries(parent):
            name = f"{prefix}.{cut.name}".lstrip(".")
            if cut.way == UNCUT_WAY:
                continue
            if isinstance(cut.value, int):
                yield name, cut.value
                continue
            if has_channels(cut.value):
                shape = cut.value.weight.shape if cut.way == "rowwise" else ()
                yield name, int(shape[INPUTS]) if shape else channels_of(cut.value)
                continue
            weight = dict(cut.value.named_parameters(include_sublayers=False)).get("weight")
            if weight is not None:
                by_rows = cut.way == "rowwise" or (
                    cut.way == "vocab" and not isinstance(cut.value, nn.Linear)
                )
                yield name, int(weight.shape[0 if by_rows else -1])


def units(model: nn.Layer) -> list[nn.Layer]:
    """The model's ordered blocks if they contain all of it; otherwise the model as one unit."""
    blocks = blocks_of(model)
    return blocks if blocks and not outside(model, blocks) else [model]


def describe_weights(model: nn.Layer) -> list[list[Weight]]:
    """The name and size of each unit's weights, and whether the `cuts` tables cut them."""
    cut_parameters = {
        id(parameter)
        for parent in model.sublayers(include_self=True)
        for cut in cut_entries(parent)
        if isinstance(cut.value, nn.Layer) and cut.way != UNCUT_WAY
        for key, parameter in cut.value.named_parameters(include_sublayers=False)
        if key not in UNCUT_PARAMETERS.get(cut.way, (lora.A,))
    }
    running = {id(tensor) for tensor in statistics(model).values()}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return [
        [
            Weight(
                name=names[id(p)],
                size=int(p.size),
                shape=tuple(p.shape),
                cut=id(p) in cut_parameters,
                frozen=p.stop_gradient,
                statistic=id(p) in running,
            )
            for p in unit.parameters()
        ]
        for unit in units(model)
    ]


def built(
    build: Callable[[], nn.Layer], numbers: Sequence[int], tp_rank: int, tp_size: int, seed: int = 0
) -> list[nn.Layer]:
    """The units `numbers` of the model with the initial weights of `seed`, cut for rank `tp_rank` of the tensor axis.

    As in a job, memory holds only this part and one parameter. Raises UsageError if there is nothing to cut, and for a
    model that must be built whole.
    """
    paddle.seed(seed)
    model, reason = without_memory(build)
    if model is None:
        raise UsageError(f"a rank's part cannot be built alone: the model is built whole, because {reason}.")
    with alone(tp_rank, tp_size) as group:
        if tp_size > 1:
            TensorParallelizer(group, Placements(), initial_weights(model)).parallelize(model)
    layers = [units(model)[number] for number in numbers]
    draw(model, [parameter for layer in layers for parameter in layer.parameters()])
    return layers
