"""Reads the `branches` tables of a model's layers, and observes these layers in a forward of some samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import paddle
from paddle import nn

from paddle_dp.errors import UsageError
from paddle_dp.parallel.dropout import install
from paddle_dp.parallel.dropout.scope import Scope
from paddle_dp.parallel.precision.amp import default_dtype, read_by
from paddle_dp.parallel.trial import trial
from paddle_dp.structure import call

Chain = tuple[str, ...]
DOCS = "docs/parallelism.md"


def chains_of(layer: nn.Layer) -> tuple[Chain, ...]:
    """A layer's table: for each branch the names of its sublayers, in their order."""
    return tuple(tuple(chain) for chain in getattr(layer, "branches", ()) or ())


def tables_of(model: nn.Layer) -> dict[str, nn.Layer]:
    """The layers with a table, by name, but for those within a branch of another."""
    found: dict[str, nn.Layer] = {}
    within: list[str] = []
    for name, layer in model.named_sublayers(include_self=True):
        if any(name == inner or name.startswith(f"{inner}.") for inner in within):
            continue
        if chains := chains_of(layer):
            found[name] = layer
            within += [f"{name}.{word}".lstrip(".") for chain in chains for word in chain]
    return found


def holder(layer: nn.Layer, name: str) -> tuple[nn.Layer, str]:
    """The layer that holds a sublayer, and its key there."""
    *path, key = name.split(".")
    for word in path:
        layer = layer._sub_layers[word]
    return layer, key


@dataclass
class Seen:
    """A layer with a table in a forward of the whole model: the input of each chain, the calls of its chains' layers in
    their order, (name, what it stands for: an input that passes, or the output of a branch), and each chain's work.

    `sizes`: numbers of each branch's output, and `learned` of the layer's inputs that have a gradient, for a sample.
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
    """A layer's inputs: those by position, then those by name, in the order of their names."""
    return [*positional, *(named[name] for name in sorted(named))]


@contextmanager
def _watched(seen: Seen, events: list[tuple[str, Any, Any]], given: list[Any]) -> Iterator[None]:
    """Notes the layer's inputs, and each call of its chains' layers: name, input, output."""

    def take(_: nn.Layer, positional: Any, named: Any) -> None:
        given.extend(in_order(positional, named))

    handles = [seen.layer.register_forward_pre_hook(take, with_kwargs=True)]
    layers = dict(seen.layer.named_sublayers())
    for word in dict.fromkeys(word for chain in seen.chains for word in chain):
        if word not in layers:
            raise UsageError(f"strategy.branches: {seen.name or 'the model'} has no layer '{word}' ({DOCS}).")

        def note(_: nn.Layer, inputs: Any, output: Any, word: str = word) -> None:
            events.append((word, inputs[0] if len(inputs) == 1 else None, output))

        handles.append(layers[word].register_forward_post_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _look(seen: Seen, events: list[tuple[str, Any, Any]], given: list[Any]) -> None:
    """Finds each chain in what was called. Raises UsageError where the table says something else."""
    where, left = seen.name or "the model", list(range(len(events)))
    stands_for: dict[int, int | None] = {}
    layers = dict(seen.layer.named_sublayers())
    for branch, chain in enumerate(seen.chains):
        value, work = None, 0.0
        for place, word in enumerate(chain):
            fits = (
                number
                for number in left
                if events[number][0] == word
                and (events[number][1] is value if place else any(events[number][1] is x for x in given))
            )
            number = next(fits, None)
            if number is None:
                before = f"what {chain[place - 1]} gave" if place else f"an input of {where}"
                raise UsageError(
                    f"strategy.branches: branch {branch} of {where} is {' → '.join(chain)}, and {word} is not called "
                    f"with {before} alone: name the layers that follow one another without anything between ({DOCS})."
                )
            left.remove(number)
            _, source, value = events[number]
            if not place:
                seen.sources.append(next(i for i, x in enumerate(given) if x is source))
            if not isinstance(value, paddle.Tensor):
                raise UsageError(f"strategy.branches: {word} of {where} gives no single tensor ({DOCS}).")
            stands_for[number] = branch if place == len(chain) - 1 else None
            weights = sum(p.size for p in layers[word].parameters() if p.ndim > 1)
            work += weights * prod(value.shape[2:]) + _of_a_sample(value)
        seen.work.append(work)
        seen.sizes.append(_of_a_sample(value))
    if left:
        word = events[left[0]][0]
        raise UsageError(
            f"strategy.branches: {where} calls {word} more often than its table names it ({DOCS})."
        )
    seen.calls = [(events[number][0], stands_for[number]) for number in sorted(stands_for)]
    seen.learned = sum(_of_a_sample(x) for x in given if isinstance(x, paddle.Tensor) and not x.stop_gradient)


def _of_a_sample(tensor: paddle.Tensor) -> float:
    return float(tensor.size / max(tensor.shape[0] if tensor.shape else 1, 1))


def observed(model: nn.Layer, inputs: Any) -> tuple[list[Seen], list[paddle.Tensor]]:
    """The layers with a table, as a forward of these `inputs` uses them, and the outputs. Raises UsageError where there
    is no table, or one is not what the model does."""
    found = [Seen(name, layer, chains_of(layer)) for name, layer in tables_of(model).items()]
    if not found:
        raise UsageError(f"strategy.branches: {type(model).__name__} has no `branches` table ({DOCS}).")
    return found, outputs_of(model, inputs, found)


def outputs_of(model: nn.Layer, inputs: Any, found: Sequence[Seen]) -> list[paddle.Tensor]:
    """The outputs in evaluation; `found` gets what is called. In training it is called too, to see what is drawn."""
    install()
    for training in (True, False) if found else (False,):
        with trial(model), default_dtype(read_by(model)):
            for layer in model.sublayers(include_self=True):
                layer.training = layer.training and training
            notes = [(seen, list[Any](), list[Any]()) for seen in found] if not training else []
            with _all(notes), Scope(0, 0, 0, 0, 2) as scope, paddle.set_grad_enabled(bool(notes)):
                draws = _counted(found, scope) if training else []
                outputs = call(model, inputs, model.forward)
                for remove in draws:
                    remove()
            for seen, events, given in notes:
                _look(seen, events, given)
    return [
        x.detach()
        for x in paddle.utils.flatten(outputs)
        if isinstance(x, paddle.Tensor) and x.is_floating_point()
    ]


@contextmanager
def _all(notes: Sequence[tuple[Seen, list[Any], list[Any]]]) -> Iterator[None]:
    if not notes:
        yield
        return
    seen, events, given = notes[0]
    with _watched(seen, events, given), _all(notes[1:]):
        yield


def _counted(found: Sequence[Seen], scope: Scope) -> list[Callable[[], None]]:
    """Hooks that refuse a branch whose layers drop: ranks would count its draws otherwise than one process."""
    removes: list[Callable[[], None]] = []
    for seen in found:
        layers = dict(seen.layer.named_sublayers())
        for word in {word for chain in seen.chains for word in chain if word in layers}:
            counts: list[int] = []

            def enter(_: nn.Layer, inputs: Any, counts: list[int] = counts) -> None:
                counts.append(sum(scope.calls.values()))

            def leave(
                _: nn.Layer, inputs: Any, outputs: Any, counts: list[int] = counts, word: str = word
            ) -> None:
                if sum(scope.calls.values()) != counts.pop():
                    raise UsageError(
                        f"strategy.branches: {word} drops, and it is in a branch: ranks would draw other masks than "
                        "one process. Let the model drop before or behind its branches, or set its dropout to 0."
                    )

            removes += [
                layers[word].register_forward_pre_hook(enter).remove,
                layers[word].register_forward_post_hook(leave).remove,
            ]
    return removes
