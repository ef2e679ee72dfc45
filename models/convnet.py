"""A small convolutional network: stages of a 3×3 convolution, halved in between, averaged at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import paddle
from paddle import nn

from models._checks import at_least_one, below_one

ACTIVATIONS: dict[str, type[nn.Layer]] = {"relu": nn.ReLU, "gelu": nn.GELU}
POOLS: dict[str, type[nn.Layer]] = {"max": nn.MaxPool2D, "mean": nn.AvgPool2D}


def _convolution(inputs: int, width: int, norm: str) -> list[nn.Layer]:
    """A 3×3 convolution, and the norm if one is asked for: it takes the mean away, so no bias is needed then."""
    if norm == "none":
        return [nn.Conv2D(inputs, width, 3, padding=1)]
    return [nn.Conv2D(inputs, width, 3, padding=1, bias_attr=False), nn.BatchNorm2D(width)]


def _averaged(images: paddle.Tensor) -> paddle.Tensor:
    """[n, width, height, width] → [n, width]: each channel's mean."""
    return images.mean([2, 3])


class ConvNet(nn.Layer):
    """Scores [n, classes] for images [n, channels, height, width] of 2^(stages - 1) pixels a side or more.

    Its blocks are the stages, and the mean over the pixels with the head.
    """

    def __init__(self, config: Config):
        super().__init__()
        layers: list[nn.Layer] = []
        blocks: list[tuple[Any, ...]] = []
        for stage, (narrow, wide) in enumerate(
            zip([config.channels, *config.widths], config.widths, strict=False)
        ):
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
    """A convolution and a halving of the image for each of `widths`, then one linear layer."""

    channels: int = 1
    """Channels of an image."""

    widths: tuple[int, ...] = (32, 64)
    """Channels behind each stage's convolution."""

    classes: int = 10
    """Scores of a sample."""

    norm: Literal["batch", "none"] = "batch"
    """`batch` puts BatchNorm2D behind each convolution."""

    activation: Literal["relu", "gelu"] = "relu"
    """A function of paddle.nn.functional."""

    pool: Literal["max", "mean"] = "max"
    """How each stage halves the image."""

    dropout: float = 0.0
    """Chance that a number behind an activation is dropped."""

    def __post_init__(self) -> None:
        at_least_one(self, "channels", "classes")
        below_one(self, "dropout")
        if not self.widths or any(width < 1 for width in self.widths):
            raise ValueError(f"widths: give one or more widths of 1 or more, not {list(self.widths)}")

    def build(self) -> nn.Layer:
        return ConvNet(self)
