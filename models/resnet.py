"""ResNet 18 to 152 of `paddle.vision.models`, optionally with a stem for small images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paddle import nn
from paddle.vision.models import resnet

from models._checks import at_least_one

# The last two convolutions of a residual block, and the norm between them.
CUTS: dict[type[nn.Layer], dict[str, str]] = {
    resnet.BasicBlock: {"conv1": "channels", "bn1": "channels", "conv2": "rowwise"},
    resnet.BottleneckBlock: {"conv2": "channels", "bn2": "channels", "conv3": "rowwise"},
}


class ResNet(resnet.ResNet):
    """Scores [n, classes] for images [n, 3, height, width]; its blocks are the stem, each residual block, the head."""

    def __init__(self, depth: int, classes: int, width: int, small_images: bool):
        kind = resnet.BasicBlock if depth < 50 else resnet.BottleneckBlock
        super().__init__(kind, depth, width=width, num_classes=classes)
        if small_images:
            self.conv1 = nn.Conv2D(3, 64, 3, stride=1, padding=1, bias_attr=False)
            self.maxpool = nn.Identity()
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in layer:
                block.cuts = CUTS[kind]
        self.cuts = {"fc": "classes"}
        stem, head = ("conv1", "bn1", "relu", "maxpool"), ("avgpool", nn.Flatten(), "fc")
        self.blocks: tuple[Any, ...] = (stem, "layer[1-4].*", head)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Its blocks, for `pipeline` and `recompute`: the stem, each residual block, the pooling with the last
    layer."""

    depth: Literal[18, 34, 50, 101, 152] = 50
    """Number of layers."""

    classes: int = 1000
    """Number of classes."""

    width: int = 64
    """Inner channels of the first stage's bottlenecks; 128 is a Wide ResNet."""

    small_images: bool = False
    """For 32×32 pixels: a 3×3 stem with stride 1, without pooling."""

    def __post_init__(self) -> None:
        at_least_one(self, "classes", "width")
        if self.depth < 50 and self.width != 64:
            raise ValueError(f"width: depth {self.depth} has blocks of width 64 only; take depth 50 or more")

    def build(self) -> nn.Layer:
        return ResNet(self.depth, self.classes, self.width, self.small_images)
