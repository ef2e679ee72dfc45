"""The input of one update: a batch, cut into micro-batches, with the numbers that make its gradients exact.

Its inputs may be more than one tensor: nested dicts and tuples, with which a model is called by name or in order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from paddle_dp.errors import UsageError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass: inputs [n, ...], targets [n, ...]; `samples` of the n rows count.

    Inputs and targets may be nested dicts or tuples of tensors with n rows each.

    `samples` is 0 for a *dummy*: one sample that a data rank without samples reads to take part in the collectives of
    the pass. Multiply its loss by zero.
    `first` is the position of the first sample in the global batch; the others follow it, unless `places` gives the
    position of each.
    `host_targets` is a copy in host memory, set on accelerators: counting it does not wait for the device.
    """

    inputs: Any
    targets: Any
    samples: int
    first: int = 0
    places: tuple[int, ...] | None = None
    host_targets: Any = None

    @property
    def rows(self) -> int:
        """n, of which `samples` count."""
        return len(leaves(self.targets)[0])

    @property
    def is_dummy(self) -> bool:
        """Whether this micro-batch is read for its collectives only."""
        return self.samples == 0


@dataclass(frozen=True, slots=True)
class Batch:
    """This rank's slice of global batch `index` of `epoch`, in micro-batches.

    `samples` counts the *global* batch, over all ranks. `waited`: seconds that this rank waited for the data. All
    random numbers of the update are drawn from `seed`, (epoch, index) and the samples' positions.
    """

    micro_batches: tuple[MicroBatch, ...]
    samples: int
    index: int
    epoch: int
    waited: float = 0.0
    seed: int = 0


# Inputs of more than one tensor ---------------------------------------------------------------------------------------
# Nested dicts and tuples with arrays or tensors as their leaves. Lists count as tuples. Dict entries are ordered by
# key, so samples with the same keys have the same structure.

Structure = Any
"""None for a leaf, {key: Structure} for a dict, [Structure, …] for a tuple: JSON."""


def structure_of(value: Any) -> Structure:
    """The shape of the nesting, without the leaves."""
    if isinstance(value, dict):
        return {key: structure_of(value[key]) for key in sorted(value)}
    if isinstance(value, (tuple, list)):
        return [structure_of(each) for each in value]
    return None


def leaves(value: Any) -> list[Any]:
    """The leaves in the order of the structure; [value] for a leaf."""
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    elif not isinstance(value, (tuple, list)):
        return [value]
    return [
        leaf
        for each in value
        for leaf in (leaves(each) if isinstance(each, (dict, tuple, list)) else (each,))
    ]


def named_leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (name, leaf): "image", "text.ids", "pair[0]"; a single leaf is ""."""
    if isinstance(value, dict):
        for key in sorted(value):
            yield from named_leaves(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            yield from named_leaves(each, f"{name}[{index}]")
    else:
        yield name, value


def unflatten(structure: Structure, flat: list[Any]) -> Any:
    """The inverse of `leaves`: rebuilds the structure, as dicts and tuples."""
    rest = iter(flat)

    def build(node: Structure) -> Any:
        if isinstance(node, dict):
            return {key: build(each) for key, each in node.items()}
        if isinstance(node, list):
            return tuple(build(each) for each in node)
        return next(rest)

    return build(structure)


def mapped(function: Callable[..., Any], *values: Any) -> Any:
    """Applies `function` to the corresponding leaves of values with one structure; returns that structure."""
    if not isinstance(values[0], (dict, tuple, list)):
        return function(*values)
    results = [function(*values_of_leaf) for values_of_leaf in zip(*map(leaves, values), strict=True)]
    return unflatten(structure_of(values[0]), results)


def call(function: Callable[..., Any], inputs: Any, origin: Callable[..., Any] | None = None) -> Any:
    """Calls the function with inputs as its parameters, or the parameters of `origin`, take them (see `arguments`)."""
    if not isinstance(inputs, (dict, tuple, list)):
        return function(inputs)
    positional, named = arguments(origin or function, inputs)
    return function(*positional, **named)


def arguments(function: Callable[..., Any], inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments (positional, by name) of a function that takes inputs: `function(**inputs)` for a dict,
    `function(*inputs)` for a tuple, and `function(inputs)` for a tensor.

    A function of one parameter gets a tuple as it is, and a dict, too, unless its keys are the function's parameters.
    Raises UsageError for inputs that do not fit the parameters.
    """
    if not isinstance(inputs, (dict, tuple, list)):
        return (inputs,), {}
    names, takes_any = _parameters(function)
    if isinstance(inputs, dict):
        if not takes_any and sum(names.values()) <= 1 and not inputs.keys() <= names.keys():
            return (inputs,), {}
        _check_keys(inputs, names, takes_any)
        return (), dict(inputs)
    if len(names) == 1 and not takes_any:
        return (tuple(inputs),), {}
    if len(inputs) < sum(names.values()) or (len(inputs) > len(names) and not takes_any):
        raise UsageError(
            f"forward takes {', '.join(names)}, and the data set's inputs are {len(inputs)}: give it as many, in "
            "this order, or a dict with their names."
        )
    return tuple(inputs), {}


def _check_keys(inputs: Mapping[str, Any], names: Mapping[str, bool], takes_any: bool) -> None:
    missing = [name for name, needed in names.items() if needed and name not in inputs]
    unknown = [] if takes_any else [name for name in inputs if name not in names]
    if not missing and not unknown:
        return
    wrong = [f"there is no '{name}'" for name in missing] + [f"'{name}' is no parameter" for name in unknown]
    raise UsageError(
        f"forward takes {', '.join(names)}, and the data set's inputs are {', '.join(sorted(inputs))}: "
        f"{', '.join(wrong)}. Rename one to match the other."
    )


def _parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """({name: whether it has no default}, whether the function may take further arguments)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}, True
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {p.name: p.default is p.empty for p in parameters if p.kind not in open_ended}
    return named, len(named) < len(parameters)
