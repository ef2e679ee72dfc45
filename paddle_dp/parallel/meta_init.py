"""A model without memory for its weights, as numbers; and one rank's part of it, built without other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paddle import nn

from paddle_dp.errors import UsageError
from paddle_dp.gloo.fake_group import alone
from paddle_dp.parallel.blocks import blocks_of, learns_of, outside, sizes_of
from paddle_dp.parallel.placement import Placements
from paddle_dp.parallel.tensor.layers import TensorParallelizer, layers_in
from paddle_dp.part import lazily
from paddle_dp.part.annotation import attention_methods_of, cuts_of
from paddle_dp.plan import Anatomy
from paddle_dp.plan.rank_memory import Weight

PARTLY: dict[str, tuple[str, ...]] = {"rowwise": ("weight",)}  # ways that leave some parameters whole


def anatomy(build: Callable[[], nn.Layer]) -> Anatomy | None:
    """What a layout must divide of this model; None where it cannot be built without memory: then the ranks will see.

    Raises UsageError that building raises on purpose: an annotation that fits no layer.
    """
    try:
        with lazily():
            model = build()
    except UsageError:
        raise
    except Exception:  # noqa: BLE001 - LazyGuard has its limits, and a rank has not
        return None
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
    """How many numbers this model trains or keeps as parameters; None where it cannot be built without memory."""
    try:
        with lazily():
            return sum(int(parameter.size) for parameter in build().parameters())
    except Exception:  # noqa: BLE001 - LazyGuard has its limits, and a rank has not
        return None


def _cuts_classes(parent: nn.Layer) -> bool:
    """Whether a table of the layer cuts what gives the scores: all but an embedding's words."""
    return any(
        way == "classes" or (way == "vocab" and not isinstance(getattr(parent, word), nn.Embedding))
        for word, way in cuts_of(parent).items()
    )


def _tied(blocks: Iterable[nn.Layer]) -> tuple[tuple[int, ...], ...]:
    """The numbers of blocks that share a weight, once for each such set."""
    users: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            users.setdefault(id(parameter), []).append(number)
    return tuple(dict.fromkeys(tuple(numbers) for numbers in users.values() if len(numbers) > 1))


def _sizes(parents: Iterable[tuple[str, nn.Layer]]) -> Iterable[tuple[str, int]]:
    """What the tensor axis must divide: a cut layer's outputs, inputs, words; a number that counts them."""
    for prefix, parent in parents:
        for word, way in cuts_of(parent).items():
            what, name = getattr(parent, word), f"{prefix}.{word}".lstrip(".")
            weight = getattr(what, "weight", None)
            if isinstance(what, int):
                yield name, what
            elif weight is not None:
                first = way == "rowwise" or (way == "vocab" and not isinstance(what, nn.Linear))
                yield name, int(weight.shape[0 if first else -1])


def units(model: nn.Layer) -> list[nn.Layer]:
    """The model's ordered blocks, where they are all of it; else the model as one."""
    blocks = blocks_of(model)
    return blocks if blocks and not outside(model, blocks) else [model]


def describe_weights(model: nn.Layer) -> list[list[Weight]]:
    """The weights of each unit as numbers, cut or not by the tables that the model's layers carry."""
    cut = {
        id(parameter)
        for parent in model.sublayers(include_self=True)
        for name, way in cuts_of(parent).items()
        if isinstance(layer := getattr(parent, name), nn.Layer)
        for word, parameter in layer.named_parameters(include_sublayers=False)
        if word in PARTLY.get(way, (word,))
    }
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    return [
        [Weight(name=names[id(p)], size=int(p.size), cut=id(p) in cut) for p in unit.parameters()]
        for unit in units(model)
    ]


def built(
    build: Callable[[], nn.Layer], numbers: Sequence[int], tp_rank: int, tp_size: int
) -> list[nn.Layer]:
    """These units of the model with their initial weights in memory, sharded for rank `tp_rank` of the tensor axis.

    One whole unit at a time is in memory, beside the cut ones: a model of any size, on the host that holds a part.
    The weights are drawn as one process draws them, but not the same ones. Raises UsageError where nothing is cut.
    """
    with lazily():
        model = build()
    every = units(model)
    here = {id(parameter) for number in numbers for parameter in every[number].parameters()}
    with alone(tp_rank, tp_size) as group:
        parallelizer = TensorParallelizer(group, Placements())
        for unit in every:
            if any(
                id(parameter) in here for parameter in unit.parameters()
            ):  # its own, or a weight that it shares
                _draw(unit.parameters())
                if tp_size > 1:
                    parallelizer.replace(model, layers_in(unit))
    return [units(model)[number] for number in numbers]


def _draw(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        if not parameter._is_initialized():
            parameter.initialize()
