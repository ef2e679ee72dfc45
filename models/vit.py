"""ViT: a transformer over the patches of an image (Dosovitskiy et al., arXiv:2010.11929)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal

from models import _transformer
from models._chain import Chain
from models._checks import at_least_one, check_dropout, check_hidden_and_epsilon, divides
from models._names import Names, encoder_names
from models._transformer import STD, linear, residual_std


class Patches(nn.Layer):
    """Images [n, channels, image, image] → [n, tokens, width]: a class token if pooled by it, one token per patch."""

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
        self.norm = nn.LayerNorm(config.width, config.epsilon)
        self.out = linear(config.width, config.classes)
        self.pool = config.pool

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.norm(x)
        return self.out(x.mean(1) if self.pool == "mean" else x[:, 0])


class ViT(Chain):
    """Scores [n, classes] for images [n, channels, image, image]."""

    hugging_face_versions: ClassVar[dict[str, str]] = {  # names in the memory of transformers 5
        **{
            f"*layers.*.attention.{new}_proj.*": f"*encoder.layer.*.attention.attention.{old}.*"
            for new, old in (("q", "query"), ("k", "key"), ("v", "value"))
        },
        "*layers.*.attention.o_proj.*": "*encoder.layer.*.attention.output.dense.*",
        "*layers.*.mlp.fc1.*": "*encoder.layer.*.intermediate.dense.*",
        "*layers.*.mlp.fc2.*": "*encoder.layer.*.output.dense.*",
        "*layers.*.layernorm_*": "*encoder.layer.*.layernorm_*",
    }

    def __init__(self, config: Config):
        blocks = [Block(config) for _ in range(config.depth)]
        super().__init__([Patches(config), *blocks, Head(config)])
        self.head_width = config.width // config.heads

    def hugging_face(self) -> Names:
        """The names of the tensors in transformers' ViTForImageClassification."""
        last, first = len(self.blocks) - 1, "vit.embeddings"
        names: Names = {
            "blocks.0.first": f"{first}.cls_token",
            "blocks.0.position": f"{first}.position_embeddings[0]",
        }
        for word, turned in (("weight", ".T"), ("bias", "")):
            names |= {
                f"blocks.0.patch.{word}": f"{first}.patch_embeddings.projection.{word}",
                f"blocks.{last}.norm.{word}": f"vit.layernorm.{word}",
                f"blocks.{last}.out.{word}": f"classifier.{word}{turned}",
            }
        norms = ("layernorm_before", "layernorm_after")
        for n in range(last - 1):
            block = f"vit.encoder.layer.{n}"
            names |= encoder_names(f"blocks.{n + 1}", block, "attention.attention", norms, self.head_width)
        return {**names, "": ("vit.pooler.*", "pooler.*", f"{first}.mask_token", "embeddings.mask_token")}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Attention weights are never dropped."""

    causal: ClassVar[bool] = False  # for `paddle-dp plan`: attention goes both ways

    hugging_face: ClassVar[dict[str, Any]] = {
        "sizes": {
            "image_size": "image", "patch_size": "patch", "num_channels": "channels", "hidden_size": "width",
            "num_hidden_layers": "depth", "num_attention_heads": "heads", "intermediate_size": "hidden",
            "layer_norm_eps": "epsilon", "num_labels": "classes", "hidden_dropout_prob": "dropout",
        },
        "always": {"pool": "class"},
        "must": {"model_type": ("vit",), "hidden_act": ("gelu",), "qkv_bias": (True,)},
        "absent": {
            "layer_norm_eps": 1e-12, "image_size": 224, "patch_size": 16, "num_channels": 3, "num_labels": 2,
            "hidden_dropout_prob": 0.0,
        },
        "architecture": "ViTForImageClassification",
        "unused": ("encoder_stride", "pooler_*", "attention_probs_dropout_prob"),
    }  # fmt: skip

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

    hidden: int | None = None
    """Width inside the MLP; 4 × `width` by default."""

    epsilon: float = 1e-5
    """Added to the variance in LayerNorm."""

    dropout: float = 0.0
    """Dropout probability of the patches and of each layer's output."""

    pool: Literal["mean", "class"] = "mean"
    """Scores come from the `mean` of all tokens, or from a `class` token."""

    def __post_init__(self) -> None:
        at_least_one(self, "image", "patch", "channels", "classes", "width", "depth", "heads")
        divides(self, "patch", "image")
        divides(self, "heads", "width")
        check_hidden_and_epsilon(self)
        check_dropout(self)

    def build(self) -> nn.Layer:
        return ViT(self)
