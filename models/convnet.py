"""A small convolutional network: 3×3 convolutions with 2×2 pooling between them, then a global mean."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import paddle
from paddle import nn

from models._checks import at_least_one, check_dropout, check_widths

ACTIVATIONS: dict[str, type[nn.Layer]] = {"relu": nn.ReLU, "gelu": nn.GELU}
POOLS: dict[str, type[nn.Layer]] = {"max": nn.MaxPool2D, "mean": nn.AvgPool2D}


def _convolution(inputs: int, width: int, norm: str) -> list[nn.Layer]:
    """A 3×3 convolution, and its norm, if any. The norm subtracts the mean, so the convolution needs no bias."""
    if norm == "none":
        return [nn.Conv2D(inputs, width, 3, padding=1)]
    return [nn.Conv2D(inputs, width, 3, padding=1, bias_attr=False), nn.BatchNorm2D(width)]


def _averaged(images: paddle.Tensor) -> paddle.Tensor:
    """[n, channels, height, width] → [n, channels]: each channel's mean."""
    return images.mean([2, 3])


class ConvNet(nn.Layer):
    """Scores [n, classes] for images [n, channels, height, width] of 2^(stages - 1) pixels a side or more.

    Its blocks are the stages, then the mean over the pixels together with the head.
    """

    def __init__(self, config: Config):
        super().__init__()
        layers: list[nn.Layer] = []
        blocks: list[tuple[Any, ...]] = []
        for stage, (narrow, wide) in enumerate(pairwise([config.channels, *config.widths])):
            each = [POOLS[config.pool](2)] if stage else []
            each += [*_convolution(narrow, wide, config.norm), ACTIVATIONS[config.activation]()]
            each += [nn.Dropout(config.dropout)] if config.dropout else []
            blocks += [tuple(f"body.{len(layers) + number}" for number in range(len(each)))]
            layers += each
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(config.widths[-1], config.classes)
        self.blocks = (*blocks, (_averaged, "head"))

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        return self.head(_averaged(self.body(images)))


@dataclass(frozen=True, kw_only=True)
class Config:
    """A convolution for each of `widths`, 2×2 pooling between them, then one linear layer."""

    channels: int = 1
    """Channels of an image."""

    widths: tuple[int, ...] = (32, 64)
    """Output channels of each convolution."""

    classes: int = 10
    """Number of classes."""

    norm: Literal["batch", "none"] = "batch"
    """`batch` adds BatchNorm2D after each convolution."""

    activation: Literal["relu", "gelu"] = "relu"
    """Activation after each convolution."""

    pool: Literal["max", "mean"] = "max"
    """Pooling between the convolutions."""

    dropout: float = 0.0
    """Dropout probability after each activation."""

    def __post_init__(self) -> None:
        at_least_one(self, "channels", "classes")
        check_dropout(self)
        check_widths(self, "widths")
        if not self.widths:
            raise ValueError("widths: give one or more, such as [32, 64]")

    def build(self) -> nn.Layer:
        return ConvNet(self)
