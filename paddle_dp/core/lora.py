"""Low-rank adapters of linear layers: output + scale · ((x A) B), with A [inputs, rank] and B [rank, outputs].

A starts random and B with zeros, so that training starts with the unchanged layer (Hu et al., arXiv:2106.09685). Both
are parameters of the layer, and a post-forward hook adds the product: for `cuts` tables, recompute and sharding it
stays a Linear. The factor with a dim sharded over the tensor axis is sharded like the weight; `between` exchanges x A,
[..., rank].

| the layer | A | B | between |
|---|---|---|---|
| whole | whole | whole | nothing |
| colwise: some outputs | whole | columns | the gradient is all-reduced; on sequence shards: all-gathered, and back |
| rowwise: some inputs | rows | whole | all-reduced; on sequence shards: reduce-scattered, and back |
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.errors import Mistake, RecipeError, UsageError, similar
from paddle_dp.text import few

A, B = "lora_A", "lora_B"
Between = Callable[[paddle.Tensor], paddle.Tensor]


class LowRank:
    """The post-forward hook of a layer that adds the low-rank product."""

    def __init__(self, scale: float, between: Between | None = None):
        self.scale, self.between = scale, between
        self._handle: Any = None

    def attach(self, layer: nn.Layer) -> None:
        """Registers the hook on a layer that has A and B."""
        layer.low_rank = self
        self._handle = layer.register_forward_post_hook(self)

    def detach(self, layer: nn.Layer) -> None:
        """Removes the hook and both factors."""
        self._handle.remove()
        for attribute in (A, B, "low_rank"):
            delattr(layer, attribute)

    def __call__(self, layer: nn.Layer, inputs: tuple[Any, ...], output: paddle.Tensor) -> paddle.Tensor:
        narrow = paddle.matmul(inputs[0], getattr(layer, A))
        if self.between is not None:
            narrow = self.between(narrow)
        return output + paddle.matmul(narrow, getattr(layer, B)) * self.scale


def low_rank_of(layer: nn.Layer) -> LowRank | None:
    """The adapter of a layer, or None."""
    low_rank = vars(layer).get("low_rank")
    return low_rank if isinstance(low_rank, LowRank) else None


def adapted_layers(model: nn.Layer) -> Iterator[tuple[str, nn.Layer, LowRank]]:
    """The layers with an adapter: name, layer, adapter."""
    for name, layer in model.named_sublayers(include_self=True):
        if (low_rank := low_rank_of(layer)) is not None:
            yield name, layer, low_rank


def add_low_rank(
    model: nn.Layer,
    match: Sequence[str],
    rank: int,
    scale: float,
    seed: int,
    values: Mapping[str, np.ndarray] | None = None,
) -> nn.Layer:
    """Adds A and B, in place, to every Linear with a name that a pattern matches; returns the model.

    A is drawn from the seed and the layer's name, independently of other draws, unless `values` has A and B by name.
    Raises RecipeError for a pattern that
    matches no Linear, and for a Linear that shares its weight, because merging would change the other layer; UsageError
    for a model that has an adapter.
    """
    linears = {name: layer for name, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}
    shared = Counter(
        id(p)
        for layer in model.sublayers(include_self=True)
        for p in layer.parameters(include_sublayers=False)
    )
    mistakes: list[Mistake] = []
    for number, pattern in enumerate(match):
        names = [name for name in linears if fnmatchcase(name, pattern)]
        wrong = "" if names else f"'{pattern}' matches no Linear layer.{_known(pattern, list(linears))}"
        if tied := next((name for name in names if shared[id(linears[name].weight)] > 1), None):
            wrong = f"'{pattern}' matches {tied}, whose weight another layer uses, too: leave it out."
        if wrong:
            path = ("adapter", "match", number)
            mistakes.append(Mistake(where="", message=f"adapter.match.{number}: {wrong}", path=path))
    if mistakes:
        raise RecipeError(mistakes)
    if any(adapted_layers(model)):
        raise UsageError("adapter: the model has an adapter already. Build a new one.")
    for name, layer in linears.items():
        if any(fnmatchcase(name, pattern) for pattern in match):
            _add(name, layer, rank, scale, seed, values or {})
    return model


def _add(
    name: str, layer: nn.Linear, rank: int, scale: float, seed: int, values: Mapping[str, np.ndarray]
) -> None:
    inputs, outputs = layer.weight.shape
    # As in PEFT and in PyTorch's Linear: Kaiming's uniform with a gain of sqrt(1/3).
    bound = 1 / np.sqrt(inputs)
    draws = np.random.default_rng([seed, zlib.crc32(name.encode())])
    dtype = layer.weight.dtype
    first = draws.uniform(-bound, bound, [inputs, rank]).astype("float32")
    for attribute, shape, initial in (
        (A, [inputs, rank], first),
        (B, [rank, outputs], np.zeros([rank, outputs], "float32")),
    ):
        begin = nn.initializer.Assign(values.get(f"{name}.{attribute}", initial))
        layer.add_parameter(attribute, layer.create_parameter(shape, dtype=dtype, default_initializer=begin))
    LowRank(scale).attach(layer)


def merge_low_rank(model: nn.Layer) -> int:
    """Adds each product to its layer's weight, computed in float64, and removes the adapters. Returns their number."""
    layers = list(adapted_layers(model))
    with paddle.no_grad():
        for _, layer, low_rank in layers:
            a, b = (getattr(layer, attribute).astype("float64") for attribute in (A, B))
            merged = layer.weight.astype("float64") + paddle.matmul(a, b) * low_rank.scale
            layer.weight.set_value(merged.astype(layer.weight.dtype))
            low_rank.detach(layer)
    return len(layers)


def _known(pattern: str, names: list[str]) -> str:
    guess = similar(pattern.strip(".*"), sorted({*names, *(name.rpartition(".")[2] for name in names)}))
    return (f" Did you mean '{guess}'?" if guess else "") + (
        f" There are {few(names, 4)}." if names else " There is none."
    )
