"""Checks that a cut model computes the same as the whole model: both run on a few samples when the model is placed.

A `cuts` table with the wrong way (`heads` for outputs that are not ordered head by head) raises no error, and the ranks
would train another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle import nn

from paddle_dp.axes.tensor.convolutions import CONVOLUTIONS
from paddle_dp.batch import call
from paddle_dp.core.batch_norm import is_batch_norm
from paddle_dp.core.extra_forwards import extra_forwards, how_different, random_state
from paddle_dp.core.precision import cast, default_dtype, read_by
from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.part.annotation import cut_entries

# Relative to the largest output: above rounding in another order, below the effect of a misplaced head.
TOLERANCE = {paddle.float64: 1e-9}
DEFAULT_TOLERANCE = 2e-4
DOCS = "docs/add-a-part.md"


class CutCheck:
    """The outputs of a whole model in evaluation for `samples()`; create it before the model is cut.

    Without samples nothing is compared. Only shapes are compared for a model that draws random numbers in evaluation,
    and unless `values`: then the caller compares values. `by_table`: its layers will be cut by their `cuts` tables.
    """

    def __init__(
        self, model: nn.Layer, samples: Callable[[], Any] | None, values: bool = True, by_table: bool = True
    ):
        self._inputs = None if samples is None else cast(samples(), read_by(model))
        self._cuts, self._full_flow = cut_layers(model) if by_table else {}, Flow()
        self._outputs: list[paddle.Tensor] = []
        self._values = values
        if samples is not None:
            self._outputs, self._full_flow, drew = self._run(model)
            self._values = values and not drew

    def check(self, model: nn.Layer, setting: str, slices: list[tuple[int, Any]]) -> None:
        """Raises UsageError unless the model, now cut, gives the same outputs. Collective over the groups that cut it.

        `setting` is the recipe's key that cut it; `slices`: (dim, group) of outputs of which ranks hold slices.
        """
        if not self._outputs:
            return
        outputs, flow, _ = self._run(model, setting)
        for full, sliced in zip(self._outputs, outputs, strict=True):
            for dim, group in slices:
                if sliced.ndim > 1 and sliced.shape[dim] != full.shape[dim]:
                    full = paddle.split(full, group.nranks, axis=dim)[group.rank]
            if sliced.shape != full.shape:
                why = wrong_output(self._cuts, self._full_flow, flow, list(sliced.shape))
                if why:
                    raise UsageError(f"{setting}: {why} ({DOCS}).")
                raise _differs(
                    model, setting, f"its outputs are {list(sliced.shape)} instead of {list(full.shape)}"
                )
            if not self._values or not full.is_floating_point():
                continue
            if how := how_different(full, sliced, TOLERANCE.get(full.dtype, DEFAULT_TOLERANCE)):
                raise _differs(model, setting, f"its outputs {how}")

    def _run(self, model: nn.Layer, setting: str = "") -> tuple[list[paddle.Tensor], Flow, bool]:
        """The outputs, the shapes at the layers, and whether random numbers were drawn.

        Raises UsageError if a layer that `setting` has cut fails.
        """
        with extra_forwards(model), default_dtype(read_by(model)), watched(model) as flow:
            for layer in model.sublayers(include_self=True):
                layer.training = False
            before = random_state()
            try:
                outputs = call(model, self._inputs, model.forward)
            except PaddleDPError:
                raise
            except Exception as error:
                why = failed_layer(model, self._cuts, self._full_flow, flow) if setting else None
                if why is None:
                    raise
                raise UsageError(f"{setting}: {why} ({DOCS}).") from error
            drew = random_state() != before
        tensors = [x for x in paddle.utils.flatten(outputs) if isinstance(x, paddle.Tensor)]
        return tensors, flow, drew


def _differs(model: nn.Layer, setting: str, how: str) -> UsageError:
    return UsageError(
        f"{setting}: cut by its `cuts` and `attention_methods`, {type(model).__name__} computes something else: {how}. "
        "`heads` needs outputs ordered by whole heads (q, k and v of one head together, or in separate layers), "
        f"`colwise` is followed by `rowwise`, and only `attention_methods` may mix tokens ({DOCS})."
    )


# The reason why a cut model fails -------------------------------------------------------------------------------------


# Ways of cutting that leave a rank only some of the outputs.
SLICED = ("colwise", "heads", "channels", "classes", "vocab")


@dataclass
class Flow:
    """The shapes at the layers of a model in one forward, by layer name.

    `inputs`: the first input of the first call. `outputs`: the first output of the last call, in the order of these
    calls. `running`: the layers that have not returned, the innermost last.
    """

    inputs: dict[str, list[int]] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    running: list[str] = field(default_factory=list)


@contextmanager
def watched(model: nn.Layer) -> Iterator[Flow]:
    """Records the shapes of a model's forward within the block."""
    flow, hooks = Flow(), []

    def enter(name: str, inputs: Any) -> None:
        flow.running.append(name)
        if (shape := _shape(inputs)) is not None:
            flow.inputs.setdefault(name, shape)

    def leave(name: str, outputs: Any) -> None:
        flow.running.pop()
        if (shape := _shape(outputs)) is not None:
            flow.outputs.pop(name, None)
            flow.outputs[name] = shape

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


def cut_layers(model: nn.Layer) -> dict[str, str]:
    """The layers that the model's `cuts` tables name, each with its way of cutting."""
    return {
        f"{prefix}.{cut.name}".lstrip("."): cut.way
        for prefix, parent in model.named_sublayers(include_self=True)
        for cut in cut_entries(parent)
        if isinstance(cut.value, nn.Layer)
    }


def failed_layer(model: nn.Layer, ways: Mapping[str, str], full: Flow, sliced: Flow) -> str | None:
    """Explains why a cut model's forward failed, and suggests a change. None if no cut layer is involved.

    `ways`: how each layer is cut. `full` and `sliced`: the shapes in the full and in the cut model.
    """
    layers = dict(model.named_sublayers(include_self=True))
    *outer, name = sliced.running or [""]
    got, needed = sliced.inputs.get(name), full.inputs.get(name)
    if ways.get(name) == "rowwise" and got is not None and got == needed:
        before = "channels" if isinstance(layers[name], CONVOLUTIONS) else "colwise"
        return (
            f"{_label(layers, name)} is cut as rowwise but got all of its inputs, {got}: rowwise follows {before}. "
            f"Cut the layer before it as {before}, or leave {name} whole"
        )
    if ways.get(name) == "channels" and got is not None and got == needed:
        return (
            f"{_label(layers, name)} is cut as channels but got all of them, {got}, where it needs those that the "
            f"layer before it makes on this rank. Cut that layer as channels, or leave {name} whole"
        )
    source = _source(ways, sliced, got)
    if source is None:
        return None
    slices = f"{source} is cut as {ways[source]}, so each rank holds {sliced.outputs[source]} of its outputs "
    slices += f"{full.outputs.get(source)}"
    way = ways[source]
    if got is None or got == needed or _width(way, got) != _width(way, sliced.outputs[source]):
        where = name if got == needed or not outer else outer[-1]
        return (
            f"{slices}, and the forward of {_label(layers, where)} fails on them. Between {way} and rowwise, "
            "let forward read sizes from its tensors, or from a number that `cuts` names as well; or leave "
            f"{source} whole"
        )
    if way == "channels" and is_batch_norm(layers[name]):
        advice = f"Cut {name} as channels, too, or leave {source} whole"
    elif isinstance(layers[name], (nn.Linear, *CONVOLUTIONS)):
        advice = f"Cut {name} as rowwise, which sums the ranks' products, or leave {source} whole"
    else:
        advice = f"A {_kind(layers[name])} needs all of them: leave {source} whole"
    return f"{slices}, and {_label(layers, name)} got {got} but needs {needed}. {advice}"


def wrong_output(ways: Mapping[str, str], full: Flow, sliced: Flow, shape: list[int]) -> str | None:
    """Explains why a cut model's output has another `shape`, and suggests a change; None unless a cut layer returned
    it."""
    source = _source(ways, sliced, shape)
    if source is None or sliced.outputs[source] != shape:
        return None
    return (
        f"{source} is cut as {ways[source]}, so each rank's model returns {shape} of its outputs "
        f"{full.outputs.get(source)}. If these are scores of classes, cut {source} as classes: the loss is then "
        f"computed over all of them. Otherwise leave {source} whole"
    )


def _source(ways: Mapping[str, str], sliced: Flow, shape: list[int] | None) -> str | None:
    """The last layer that returned slices; if possible, one with slices as wide as `shape`."""
    sources = [name for name in sliced.outputs if ways.get(name) in SLICED]
    matching = [
        name
        for name in sources
        if shape and _width(ways[name], sliced.outputs[name]) == _width(ways[name], shape)
    ]
    return next(reversed(matching or sources), None)


def _width(way: str, shape: list[int]) -> list[int]:
    """The size of the dim that this way of cutting shards."""
    return shape[1:2] if way == "channels" else shape[-1:]


def _label(layers: Mapping[str, nn.Layer], name: str) -> str:
    return f"{name or 'the model'} ({_kind(layers[name])})"


def _kind(layer: nn.Layer) -> str:
    """The class of a layer before it was cut."""
    return type(layer).__name__.replace("ColumnParallel", "").replace("RowParallel", "")
