"""A classifier with very many classes: a backbone embeds each sample, the head has one weight column per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal
from paddle.vision import models as vision

from models._checks import at_least_one, check_widths
from models.mlp import gelu_layers


class Cosines(nn.Layer):
    """[n, width] → [n, classes]: the cosine of the angle between each embedding and each class's weights.

    Products are divided by both norms, which needs no normalized copy of the weights.
    """

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.weight = self.create_parameter([width, classes], default_initializer=Normal(0.0, width**-0.5))

    def forward(self, embeddings: paddle.Tensor) -> paddle.Tensor:
        lengths = paddle.linalg.norm(self.weight, axis=0).clip(min=1e-12)
        return paddle.matmul(F.normalize(embeddings, axis=-1), self.weight) / lengths


class Perceptron(nn.Layer):
    """[n, …] with `inputs` numbers per sample → [n, widths[-1]]."""

    def __init__(self, inputs: int, widths: Sequence[int]):
        super().__init__()
        self.layers = nn.Sequential(*gelu_layers([inputs, *widths]))

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.layers(samples.flatten(1) if samples.ndim > 2 else samples)


_RESNET: tuple[Any, ...] = (  # a backbone's blocks, by the names of layers
    ("backbone.conv1", "backbone.bn1", "backbone.relu", "backbone.maxpool"),
    "backbone.layer[1-4].*",
)


class LargeClassifier(nn.Layer):
    """Scores [n, classes] for samples [n, …]; its blocks are the backbone's, the embedding and the head."""

    cuts: ClassVar[dict[str, str]] = {"head": "classes"}

    def __init__(self, config: Config):
        super().__init__()
        if config.backbone == "mlp":
            self.backbone: nn.Layer = Perceptron(config.inputs, config.hidden)
            features = [config.inputs, *config.hidden][-1]
        else:
            self.backbone = getattr(vision, config.backbone)(num_classes=0)
            features = 2048 if config.backbone == "resnet50" else 512
        self.embed = nn.Linear(features, config.width)
        kind = Cosines if config.cosines else nn.Linear
        self.head = kind(config.width, config.classes)
        images = config.backbone != "mlp"
        first, last = (_RESNET, ("backbone.avgpool",)) if images else (("backbone",), ())
        self.blocks: tuple[Any, ...] = (*first, (*last, nn.Flatten(), "embed"), "head")

    def embedding(self, samples: paddle.Tensor) -> paddle.Tensor:
        """Embeddings [n, width]: similar for samples of one class, even of an untrained one."""
        return self.embed(self.backbone(samples).flatten(1))

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.embedding(samples))


@dataclass(frozen=True, kw_only=True)
class Config:
    cuts_classes: ClassVar[bool] = True
    """The last layer can be split by classes over the tensor axis."""

    inputs: int = 64
    """Numbers in a sample, for `backbone: mlp`."""

    hidden: tuple[int, ...] = (256,)
    """Widths of the layers, for `backbone: mlp`."""

    backbone: Literal["mlp", "resnet18", "resnet34", "resnet50"] = "mlp"
    """`mlp` takes any samples, a ResNet takes images."""

    width: int = 64
    """Width of the embedding."""

    classes: int = 1000
    """Number of classes."""

    cosines: bool = True
    """Scores are cosines, as margin_softmax requires; false: products and a bias."""

    def __post_init__(self) -> None:
        at_least_one(self, "inputs", "width", "classes")
        check_widths(self, "hidden")

    def build(self) -> nn.Layer:
        return LargeClassifier(self)
