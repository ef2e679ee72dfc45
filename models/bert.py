"""BERT: a bidirectional transformer that predicts masked tokens (Devlin et al., arXiv:1810.04805), post-norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal

from models import _transformer
from models._chain import Chain
from models._checks import at_least_one, check_dropout, check_hidden_and_epsilon, divides
from models._names import Names, encoder_names
from models._transformer import STD, TiedOutput, linear


class Embedding(nn.Layer):
    """Tokens int64 [n, t] → [n, t, width]: the sum of token and position embeddings, and of the first segment's if
    there are segments: a text is one segment."""

    cuts: ClassVar[dict[str, str]] = {"token": "vocab"}

    def __init__(self, config: Config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width, weight_attr=Normal(0.0, STD))
        self.position = self.create_parameter(
            [config.length, config.width], default_initializer=Normal(0.0, STD)
        )
        self.segment = (
            self.create_parameter([config.segments, config.width], default_initializer=Normal(0.0, STD))
            if config.segments
            else None
        )
        self.norm, self.dropout = nn.LayerNorm(config.width, config.epsilon), nn.Dropout(config.dropout)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        return self.dropout(self.norm(x if self.segment is None else x + self.segment[0]))


class Block(_transformer.Block):
    """[n, t, width] → the same: bidirectional self-attention, then an MLP."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.norm1(x + self.dropout(self.out(self._attend(self.qkv(x)))))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Head(nn.Layer):
    """[n, t, width] → scores [n, t, vocab] of each original token."""

    cuts: ClassVar[dict[str, str]] = {"out": "vocab"}

    def __init__(self, config: Config, tied_to: nn.Embedding | None):
        super().__init__()
        self.dense, self.norm = linear(config.width, config.width), nn.LayerNorm(config.width, config.epsilon)
        self.out = linear(config.width, config.vocab) if tied_to is None else TiedOutput(tied_to, bias=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.out(self.norm(F.gelu(self.dense(x))))


class BERT(Chain):
    """Scores [n, t, vocab] of each token before masking, for tokens int64 [n, t]."""

    # Names in the first published weights.
    hugging_face_versions: ClassVar[dict[str, str]] = {"*.gamma": "*.weight", "*.beta": "*.bias"}
    paddle_nlp: ClassVar[dict[str, str]] = {
        "bert.embeddings.LayerNorm.*": "bert.embeddings.layer_norm.*",
        "bert.encoder.layer.*.attention.self.query.*": "bert.encoder.layers.*.self_attn.q_proj.*",
        "bert.encoder.layer.*.attention.self.key.*": "bert.encoder.layers.*.self_attn.k_proj.*",
        "bert.encoder.layer.*.attention.self.value.*": "bert.encoder.layers.*.self_attn.v_proj.*",
        "bert.encoder.layer.*.attention.output.dense.*": "bert.encoder.layers.*.self_attn.out_proj.*",
        "bert.encoder.layer.*.attention.output.LayerNorm.*": "bert.encoder.layers.*.norm1.*",
        "bert.encoder.layer.*.intermediate.dense.*": "bert.encoder.layers.*.linear1.*",
        "bert.encoder.layer.*.output.dense.*": "bert.encoder.layers.*.linear2.*",
        "bert.encoder.layer.*.output.LayerNorm.*": "bert.encoder.layers.*.norm2.*",
        "cls.predictions.transform.dense.*": "cls.predictions.transform.*",
        "cls.predictions.transform.LayerNorm.*": "cls.predictions.layer_norm.*",
        "cls.predictions.decoder.weight": "cls.predictions.decoder_weight.T",  # [vocab, width]
        "cls.predictions.decoder.bias": "cls.predictions.decoder_bias",
        "cls.predictions.bias": "cls.predictions.decoder_bias",
    }

    def __init__(self, config: Config):
        blocks = [Block(config) for _ in range(config.depth)]
        embedding = Embedding(config)
        super().__init__([embedding, *blocks, Head(config, embedding.token if config.tied else None)])
        self.head_width, self.tied = config.width // config.heads, config.tied

    def hugging_face(self) -> Names:
        """The names of the tensors in transformers' BertForMaskedLM."""
        last, head, first = len(self.blocks) - 1, "cls.predictions", "bert.embeddings"
        tied = f"{first}.word_embeddings.weight"
        names: Names = {
            "blocks.0.token.weight": tied,
            "blocks.0.position": f"{first}.position_embeddings.weight",
            "blocks.0.segment": f"{first}.token_type_embeddings.weight",
            f"blocks.{last}.dense.weight": f"{head}.transform.dense.weight.T",
            f"blocks.{last}.dense.bias": f"{head}.transform.dense.bias",
            f"blocks.{last}.out.weight": tied if self.tied else f"{head}.decoder.weight.T",
            f"blocks.{last}.out.bias": f"{head}.bias" if self.tied else f"{head}.decoder.bias",
        }
        for word in ("weight", "bias"):
            names |= {
                f"blocks.0.norm.{word}": f"{first}.LayerNorm.{word}",
                f"blocks.{last}.norm.{word}": f"{head}.transform.LayerNorm.{word}",
            }
        norms = ("attention.output.LayerNorm", "output.LayerNorm")
        for n in range(last - 1):
            block = f"bert.encoder.layer.{n}"
            names |= encoder_names(f"blocks.{n + 1}", block, "attention.self", norms, self.head_width)
        unused = ("*embeddings.position_ids", "bert.pooler.*", "pooler.*", "cls.seq_relationship.*")
        twice = (f"{head}.decoder.weight", f"{head}.decoder.bias") if self.tied else (f"{head}.bias",)
        return {**names, "": (*unused, *twice)}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Attention weights are never dropped."""

    hugging_face: ClassVar[dict[str, Any]] = {
        "sizes": {
            "vocab_size": "vocab", "hidden_size": "width", "num_hidden_layers": "depth",
            "num_attention_heads": "heads", "intermediate_size": "hidden", "max_position_embeddings": "length",
            "type_vocab_size": "segments", "layer_norm_eps": "epsilon", "tie_word_embeddings": "tied",
            "hidden_dropout_prob": "dropout",
        },
        "must": {"model_type": ("bert",), "hidden_act": ("gelu",), "position_embedding_type": ("absolute",)},
        "absent": {
            "layer_norm_eps": 1e-12, "type_vocab_size": 2, "tie_word_embeddings": True, "hidden_dropout_prob": 0.1,
        },
        "least": {"segments": 1},
        "architecture": "BertForMaskedLM",
        "unused": ("directionality", "pooler_*", "pool_act", "attention_probs_dropout_prob", "classifier_dropout"),
    }  # fmt: skip

    vocab: int = 264
    """Tokens of the vocabulary, including the mask."""

    width: int = 128
    """Width of a token between the blocks."""

    depth: int = 4
    """Number of blocks."""

    heads: int = 4
    """Attention heads; must divide `width`."""

    length: int = 128
    """Longest text, in tokens."""

    segments: int = 0
    """Number of segment embeddings, as in the published weights; texts use the first. 0: none."""

    hidden: int | None = None
    """Width inside the MLP; 4 × `width` by default."""

    epsilon: float = 1e-5
    """Added to the variance in LayerNorm."""

    dropout: float = 0.0
    """Dropout probability of the embedding and of each layer's output."""

    tied: bool = False
    """The output layer uses the embedding's weights, and a separate bias."""

    def __post_init__(self) -> None:
        at_least_one(self, "vocab", "width", "depth", "heads", "length")
        divides(self, "heads", "width")
        if self.segments < 0:
            raise ValueError(f"segments: {self.segments} is less than 0")
        check_hidden_and_epsilon(self)
        check_dropout(self)

    def build(self) -> nn.Layer:
        return BERT(self)
