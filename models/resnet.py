"""ResNet 18 to 152 of `paddle.vision.models`, with the small-image stem as an option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paddle import nn
from paddle.vision.models.resnet import BasicBlock, BottleneckBlock, ResNet

from models._checks import at_least_one


@dataclass(frozen=True, kw_only=True)
class Config:
    """`width: 128` is a Wide ResNet; `small_images` (32×32): a 3×3 stem of stride 1 and no pooling."""

    depth: Literal[18, 34, 50, 101, 152] = 50
    classes: int = 1000
    width: int = 64
    small_images: bool = False

    def __post_init__(self) -> None:
        at_least_one(self, "classes", "width")
        if self.depth < 50 and self.width != 64:
            raise ValueError(f"width: depth {self.depth} has blocks of width 64 only; take depth 50 or more")

    def build(self) -> nn.Layer:
        block = BasicBlock if self.depth < 50 else BottleneckBlock
        model = ResNet(block, self.depth, width=self.width, num_classes=self.classes)
        if self.small_images:
            model.conv1 = nn.Conv2D(3, 64, 3, stride=1, padding=1, bias_attr=False)
            model.maxpool = nn.Identity()
        return model
