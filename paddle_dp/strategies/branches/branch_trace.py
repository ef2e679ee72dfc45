"""Reads the `branches` tables of a model's layers, and traces these layers in a forward of some samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import paddle
from paddle import nn

from paddle_dp.batch import call
from paddle_dp.core.dropout import install
from paddle_dp.core.dropout.scope import Scope
from paddle_dp.core.extra_forwards import extra_forwards
from paddle_dp.core.precision import default_dtype, read_by
from paddle_dp.errors import UsageError

Chain = tuple[str, ...]
DOCS = "docs/parallelism.md"


def chains_of(layer: nn.Layer) -> tuple[Chain, ...]:
    """A layer's table: the names of each branch's sublayers, in order."""
    return tuple(tuple(chain) for chain in getattr(layer, "branches", ()) or ())


def tables_of(model: nn.Layer) -> dict[str, nn.Layer]:
    """The layers with a table, by name, except layers within another's branch."""
    tables: dict[str, nn.Layer] = {}
    within: list[str] = []
    for name, layer in model.named_sublayers(include_self=True):
        if any(name == inner or name.startswith(f"{inner}.") for inner in within):
            continue
        if chains := chains_of(layer):
            tables[name] = layer
            within += [f"{name}.{name_of_layer}".lstrip(".") for chain in chains for name_of_layer in chain]
    return tables


def holder(layer: nn.Layer, name: str) -> tuple[nn.Layer, str]:
    """The layer that holds a sublayer, and its key there."""
    *path, key = name.split(".")
    for name_of_layer in path:
        layer = layer._sub_layers[name_of_layer]
    return layer, key


@dataclass
class BranchTrace:
    """A layer with a table, as a forward of the whole model uses it.

    `sources`: the input's index for each chain. `calls`: the calls of the chains' layers in order: (name, branch whose
    output it returns, or None if its input passes through). `work`: of each chain. `sizes`: elements per sample of each
    branch's output. `learned`: elements per sample of the layer's inputs that have a gradient.
    """

    name: str
    layer: nn.Layer
    chains: tuple[Chain, ...]
    sources: list[int] = field(default_factory=list)
    calls: list[tuple[str, int | None]] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    learned: float = 0.0
    owners: list[int] = field(default_factory=list)  # by branch: a rank of the group


def in_order(positional: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """A layer's inputs: positional ones, then named ones sorted by name."""
    return [*positional, *(named[name] for name in sorted(named))]


@contextmanager
def _recording(
    trace: BranchTrace, events: list[tuple[str, Any, Any]], layer_inputs: list[Any]
) -> Iterator[None]:
    """Records the layer's inputs, and each call of its chains' layers: name, input, output."""

    def take(_: nn.Layer, positional: Any, named: Any) -> None:
        layer_inputs.extend(in_order(positional, named))

    handles = [trace.layer.register_forward_pre_hook(take, with_kwargs=True)]
    layers = dict(trace.layer.named_sublayers())
    for path in dict.fromkeys(path for chain in trace.chains for path in chain):
        if path not in layers:
            raise UsageError(
                f"strategy.branches: {trace.name or 'the model'} has no layer '{path}' ({DOCS})."
            )

        def note(_: nn.Layer, inputs: Any, output: Any, path: str = path) -> None:
            events.append((path, inputs[0] if len(inputs) == 1 else None, output))

        handles.append(layers[path].register_forward_post_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _match_chains(trace: BranchTrace, events: list[tuple[str, Any, Any]], layer_inputs: list[Any]) -> None:
    """Finds each chain among the recorded calls. Raises UsageError if the table says otherwise."""
    owner, left = trace.name or "the model", list(range(len(events)))
    stands_for: dict[int, int | None] = {}
    layers = dict(trace.layer.named_sublayers())
    for branch, chain in enumerate(trace.chains):
        value, work = None, 0.0
        for position, path in enumerate(chain):
            fits = (
                number
                for number in left
                if events[number][0] == path
                and (
                    events[number][1] is value
                    if position
                    else any(events[number][1] is x for x in layer_inputs)
                )
            )
            number = next(fits, None)
            if number is None:
                before = f"the output of {chain[position - 1]}" if position else f"an input of {owner}"
                raise UsageError(
                    f"strategy.branches: branch {branch} of {owner} is {' → '.join(chain)}, and {path} is not called "
                    f"with {before} alone: name layers that follow one another with nothing in between ({DOCS})."
                )
            left.remove(number)
            _, source, value = events[number]
            if not position:
                trace.sources.append(next(i for i, x in enumerate(layer_inputs) if x is source))
            if not isinstance(value, paddle.Tensor):
                raise UsageError(
                    f"strategy.branches: {path} of {owner} does not return a single tensor ({DOCS})."
                )
            stands_for[number] = branch if position == len(chain) - 1 else None
            weights = sum(p.size for p in layers[path].parameters() if p.ndim > 1)
            work += weights * prod(value.shape[2:]) + _size_of_sample(value)
        trace.work.append(work)
        trace.sizes.append(_size_of_sample(value))
    if left:
        path = events[left[0]][0]
        raise UsageError(
            f"strategy.branches: {owner} calls {path} more often than its table names it ({DOCS})."
        )
    trace.calls = [(events[number][0], stands_for[number]) for number in sorted(stands_for)]
    trace.learned = sum(
        _size_of_sample(x) for x in layer_inputs if isinstance(x, paddle.Tensor) and not x.stop_gradient
    )


def _size_of_sample(tensor: paddle.Tensor) -> float:
    return float(tensor.size / max(tensor.shape[0] if tensor.shape else 1, 1))


def observed(model: nn.Layer, inputs: Any) -> tuple[list[BranchTrace], list[paddle.Tensor]]:
    """Traces the layers with a table in a forward of these `inputs`; also returns the outputs. Raises UsageError if
    there is no table, or one does not match the model."""
    traces = [BranchTrace(name, layer, chains_of(layer)) for name, layer in tables_of(model).items()]
    if not traces:
        raise UsageError(f"strategy.branches: {type(model).__name__} has no `branches` table ({DOCS}).")
    return traces, outputs_of(model, inputs, traces)


def outputs_of(model: nn.Layer, inputs: Any, traces: Sequence[BranchTrace]) -> list[paddle.Tensor]:
    """The outputs in evaluation; fills `traces` with the recorded calls. Also runs a forward in training, to detect
    draws."""
    install()
    for training in (True, False) if traces else (False,):
        with extra_forwards(model), default_dtype(read_by(model)):
            for layer in model.sublayers(include_self=True):
                layer.training = layer.training and training
            notes = [(trace, list[Any](), list[Any]()) for trace in traces] if not training else []
            with _all(notes), Scope(0, 0, 0, 0, 2) as scope, paddle.set_grad_enabled(bool(notes)):
                draws = _counting(traces, scope) if training else []
                outputs = call(model, inputs, model.forward)
                for remove in draws:
                    remove()
            for trace, events, layer_inputs in notes:
                _match_chains(trace, events, layer_inputs)
    return [
        x.detach()
        for x in paddle.utils.flatten(outputs)
        if isinstance(x, paddle.Tensor) and x.is_floating_point()
    ]


@contextmanager
def _all(notes: Sequence[tuple[BranchTrace, list[Any], list[Any]]]) -> Iterator[None]:
    if not notes:
        yield
        return
    trace, events, layer_inputs = notes[0]
    with _recording(trace, events, layer_inputs), _all(notes[1:]):
        yield


def _counting(traces: Sequence[BranchTrace], scope: Scope) -> list[Callable[[], None]]:
    """Hooks that refuse a dropout within a branch: ranks would number its draws differently than one process."""
    removes: list[Callable[[], None]] = []
    for trace in traces:
        layers = dict(trace.layer.named_sublayers())
        for path in {path for chain in trace.chains for path in chain if path in layers}:
            counts: list[int] = []

            def enter(_: nn.Layer, inputs: Any, counts: list[int] = counts) -> None:
                counts.append(sum(scope.calls.values()))

            def leave(
                _: nn.Layer, inputs: Any, outputs: Any, counts: list[int] = counts, path: str = path
            ) -> None:
                if sum(scope.calls.values()) != counts.pop():
                    raise UsageError(
                        f"strategy.branches: {path} drops, and it is in a branch: ranks would draw other masks than "
                        "one process. Let the model drop before or after its branches, or set its dropout to 0."
                    )

            removes += [
                layers[path].register_forward_pre_hook(enter).remove,
                layers[path].register_forward_post_hook(leave).remove,
            ]
    return removes
