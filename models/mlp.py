"""A multi-layer perceptron over flattened samples of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import paddle
from paddle import nn

from models._checks import at_least_one, check_dropout, check_widths

ACTIVATIONS: dict[str, type[nn.Layer]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.Silu, "tanh": nn.Tanh}


def gelu_layers(widths: Sequence[int]) -> list[nn.Layer]:
    """Linear layers from each width to the next, each with a GELU behind it."""
    return [layer for narrow, wide in pairwise(widths) for layer in (nn.Linear(narrow, wide), nn.GELU())]


class MLP(nn.Layer):
    """Scores [n, classes] for samples [n, …] of `inputs` numbers each.

    Its blocks are the hidden layers, each with its activation and dropout, and the head. Layers are cut in pairs, by
    outputs and by inputs; the last of an odd number stays whole.
    """

    def __init__(self, inputs: int, hidden: Sequence[int], classes: int, activation: str, dropout: float):
        super().__init__()
        layers: list[nn.Layer] = []
        blocks: list[tuple[Any, ...]] = []
        cuts: dict[str, str] = {}
        for depth, (narrow, wide) in enumerate(pairwise([inputs, *hidden])):
            each = [nn.Linear(narrow, wide), ACTIVATIONS[activation]()]
            each += [nn.Dropout(dropout)] if dropout else []
            names = [str(len(layers) + number) for number in range(len(each))]
            cuts |= {names[0]: "rowwise"} if depth % 2 else dict.fromkeys(names[::2], "colwise")
            blocks += [tuple(f"body.{name}" for name in names)]
            layers += each
        self.body = nn.Sequential(*layers)
        self.body.cuts = cuts
        self.head = nn.Linear([inputs, *hidden][-1], classes)
        self.cuts = {"head": "rowwise"} if len(hidden) % 2 else {}
        first, *rest = *blocks, ("head",)
        self.blocks = ((nn.Flatten(), *first), *rest)

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.body(samples.flatten(1) if samples.ndim > 2 else samples))


@dataclass(frozen=True, kw_only=True)
class Config:
    inputs: int = 64
    """Numbers in a sample."""

    hidden: tuple[int, ...] = (128, 128)
    """Widths of the hidden layers."""

    classes: int = 10
    """Number of classes."""

    activation: Literal["relu", "gelu", "silu", "tanh"] = "relu"
    """Activation after each hidden layer."""

    dropout: float = 0.0
    """Dropout probability after each hidden layer."""

    def __post_init__(self) -> None:
        at_least_one(self, "inputs", "classes")
        check_widths(self, "hidden")
        check_dropout(self)

    def build(self) -> nn.Layer:
        return MLP(self.inputs, self.hidden, self.classes, self.activation, self.dropout)
