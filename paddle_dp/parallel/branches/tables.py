"""The `branches` tables of a model's layers."""

from __future__ import annotations

from paddle import nn

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
