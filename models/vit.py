"""ViT: a transformer over the patches of an image (Dosovitskiy et al., arXiv:2010.11929)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal

from models import _transformer
from models._chain import Chain
from models._checks import at_least_one, check_dropout, divides
from models._transformer import STD, linear, residual_std


class Patches(nn.Layer):
    """Images [n, channels, image, image] → [n, tokens, width]: a class token if pooled so, one token per patch."""

    def __init__(self, config: Config):
        super().__init__()
        width, patch = config.width, config.patch
        has_class_token = config.pool == "class"
        tokens = (config.image // patch) ** 2 + has_class_token
        self.patch = nn.Conv2D(config.channels, width, patch, stride=patch, weight_attr=Normal(0.0, STD))
        self.position = self.create_parameter([tokens, width], default_initializer=Normal(0.0, STD))
        initial = Normal(0.0, STD)
        self.first = (
            self.create_parameter([1, 1, width], default_initializer=initial) if has_class_token else None
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, images: paddle.Tensor) -> paddle.Tensor:
        tokens = self.patch(images).flatten(2).transpose([0, 2, 1])
        if self.first is not None:
            first = paddle.zeros_like(tokens[:, :1]) + self.first.astype(tokens.dtype)
            tokens = paddle.concat([first, tokens], axis=1)
        return self.dropout(tokens + self.position)


class Block(_transformer.Block):
    """[n, tokens, width] → the same: self-attention, then an MLP."""

    def __init__(self, config: Config):
        super().__init__(config, residual_std(config.depth))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = x + self.dropout(self.out(self._attend(self.qkv(self.norm1(x)))))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Head(nn.Layer):
    """[n, tokens, width] → scores [n, classes], from the mean of all tokens or from the class token."""

    def __init__(self, config: Config):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(config.width), linear(config.width, config.classes)
        self.pool = config.pool

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.norm(x)
        return self.out(x.mean(1) if self.pool == "mean" else x[:, 0])


class ViT(Chain):
    """Scores [n, classes] for images [n, channels, image, image]."""

    def __init__(self, config: Config):
        blocks = [Block(config) for _ in range(config.depth)]
        super().__init__([Patches(config), *blocks, Head(config)])


@dataclass(frozen=True, kw_only=True)
class Config:
    """Attention weights are never dropped."""

    image: int = 224
    """Side of an image in pixels; images are square."""

    patch: int = 16
    """Side of a patch in pixels; must divide `image`."""

    channels: int = 3
    """Channels of an image."""

    classes: int = 1000
    """Number of classes."""

    width: int = 192
    """Width of a token between the blocks."""

    depth: int = 12
    """Number of blocks."""

    heads: int = 3
    """Attention heads; must divide `width`."""

    dropout: float = 0.0
    """Dropout probability of the patches and of each layer's output."""

    pool: Literal["mean", "class"] = "mean"
    """Scores come from the `mean` of all tokens, or from a `class` token."""

    def __post_init__(self) -> None:
        at_least_one(self, "image", "patch", "channels", "classes", "width", "depth", "heads")
        divides(self, "patch", "image")
        divides(self, "heads", "width")
        check_dropout(self)

    def build(self) -> nn.Layer:
        return ViT(self)
