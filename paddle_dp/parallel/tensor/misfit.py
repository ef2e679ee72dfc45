"""Which layer of a cut model was given a slice where it wants the whole, or the whole where it wants a slice.

Paddle says it as a matrix product whose shapes do not fit. Here the same layer's inputs in the whole model stand beside
those in the cut one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle import nn

from paddle_dp.part.annotation import cuts_of

SLICED = (
    "colwise",
    "heads",
    "classes",
    "vocab",
)  # ways after which a rank holds some of the outputs only


@dataclass
class Flow:
    """What went through the layers of a model in one forward, by their names; `running`: those that did not end, the
    innermost last."""

    taken: dict[str, list[int]] = field(
        default_factory=dict
    )  # the shape of the first input, of the first call
    given: dict[str, list[int]] = field(
        default_factory=dict
    )  # of the first output, of the last call; in that order
    running: list[str] = field(default_factory=list)


@contextmanager
def watched(model: nn.Layer) -> Iterator[Flow]:
    """Watches what is forwarded through a model."""
    flow, hooks = Flow(), []

    def enter(name: str, inputs: Any) -> None:
        flow.running.append(name)
        if (shape := _shape(inputs)) is not None:
            flow.taken.setdefault(name, shape)

    def leave(name: str, outputs: Any) -> None:
        flow.running.pop()
        if (shape := _shape(outputs)) is not None:
            flow.given.pop(name, None)
            flow.given[name] = shape

    for name, layer in model.named_sublayers(include_self=True):
        hooks.append(layer.register_forward_pre_hook(lambda _, x, name=name: enter(name, x)))
        hooks.append(layer.register_forward_post_hook(lambda _, x, y, name=name: leave(name, y)))
    try:
        yield flow
    finally:
        for hook in hooks:
            hook.remove()


def _shape(data: Any) -> list[int] | None:
    tensors = [x for x in paddle.utils.flatten(data) if isinstance(x, paddle.Tensor)]
    return list(tensors[0].shape) if tensors else None


def ways(model: nn.Layer) -> dict[str, str]:
    """By name the layers that the model's `cuts` tables cut, and how."""
    return {
        f"{prefix}.{word}".lstrip("."): way
        for prefix, parent in model.named_sublayers(include_self=True)
        for word, way in cuts_of(parent).items()
        if isinstance(getattr(parent, word), nn.Layer)
    }


def stopped(model: nn.Layer, cut: Mapping[str, str], whole: Flow, part: Flow) -> str | None:
    """Why the forward of a cut model, `part`, stopped where the `whole` one's went on, and what to write instead.

    `cut` has the layers' ways. None where no layer that is cut has to do with it.
    """
    layers = dict(model.named_sublayers(include_self=True))
    *outer, name = part.running or [""]
    got, wants = part.taken.get(name), whole.taken.get(name)
    if cut.get(name) == "rowwise" and got is not None and got == wants:
        return (
            f"{_label(layers, name)} is cut as rowwise, and got all of its inputs, {got}: rowwise takes what "
            f"colwise gives. Cut the layer before it as colwise, or leave {name} whole"
        )
    maker = _maker(cut, part, got)
    if maker is None:
        return None
    slices = f"{maker} is cut as {cut[maker]}, so each rank holds {part.given[maker]} of its outputs "
    slices += f"{whole.given.get(maker)}"
    if got is None or got == wants or got[-1] != part.given[maker][-1]:
        where = name if got == wants or not outer else outer[-1]
        return (
            f"{slices}, and the forward of {_label(layers, where)} cannot go on with them. Between colwise and "
            "rowwise, a forward reads shapes from its tensors, or from a whole number that is in `cuts`, too; else "
            f"leave {maker} whole"
        )
    if isinstance(layers[name], nn.Linear):
        then = f"Cut {name} as rowwise, which adds up what the ranks have of it, or leave {maker} whole"
    else:
        then = f"A {_kind(layers[name])} needs all of them: leave {maker} whole"
    return f"{slices}, and {_label(layers, name)} got {got} where it wants {wants}. {then}"


def ended(cut: Mapping[str, str], whole: Flow, part: Flow, outputs: list[int]) -> str | None:
    """Why a cut model gives `outputs` of another shape, where a layer that is cut gave the last of them."""
    maker = _maker(cut, part, outputs)
    if maker is None or part.given[maker] != outputs:
        return None
    return (
        f"{maker} is cut as {cut[maker]}, and what each rank holds, {outputs} of its outputs {whole.given.get(maker)}, "
        f"is what the model gives. If these are scores of classes, cut {maker} as classes, and the loss is computed "
        f"over all of them; else leave {maker} whole"
    )


def _maker(cut: Mapping[str, str], part: Flow, shape: list[int] | None) -> str | None:
    """The cut layer that gave slices last: those as wide as `shape`, if any."""
    makers = [name for name in part.given if cut.get(name) in SLICED]
    fitting = [name for name in makers if shape and part.given[name][-1:] == shape[-1:]]
    return next(reversed(fitting or makers), None)


def _label(layers: Mapping[str, nn.Layer], name: str) -> str:
    return f"{name or 'the model'} ({_kind(layers[name])})"


def _kind(layer: nn.Layer) -> str:
    """The class of a layer, or of what it was before it was cut."""
    return type(layer).__name__.replace("ColumnParallel", "").replace("RowParallel", "")
