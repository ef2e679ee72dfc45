"""BERT: a bidirectional transformer that predicts masked tokens (Devlin et al., arXiv:1810.04805), post-norm.

ERNIE 1.0 to 3.0 (Sun et al., arXiv:1904.09223, 1907.12412) are BERTs with another activation or embeddings of tasks.
"""

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
from models._transformer import STD, TiedOutput, linear


class Embedding(nn.Layer):
    """Tokens int64 [n, t] → [n, t, width]: the sum of token and position embeddings, and of the first segment's and the
    first task's if there are segments and tasks: a text is one segment, of one task."""

    cuts: ClassVar[dict[str, str]] = {"token": "vocab"}

    def __init__(self, config: Config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width, weight_attr=Normal(0.0, STD))

        def table(rows: int) -> paddle.Tensor:
            return self.create_parameter([rows, config.width], default_initializer=Normal(0.0, STD))

        self.position = table(config.length)
        self.segment, self.task = (table(rows) if rows else None for rows in (config.segments, config.tasks))
        self.norm, self.dropout = nn.LayerNorm(config.width, config.epsilon), nn.Dropout(config.dropout)

    def forward(self, tokens: paddle.Tensor) -> paddle.Tensor:
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for kinds in (self.segment, self.task):
            x = x if kinds is None else x + kinds[0]
        return self.dropout(self.norm(x))


class Block(_transformer.Block):
    """[n, t, width] → the same: bidirectional self-attention, then an MLP."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.activation = config.activation

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.norm1(x + self.dropout(self.out(self._attend(self.qkv(x)))))
        return self.norm2(x + self.dropout(self.down(_activated(self.up(x), self.activation))))


class Head(nn.Layer):
    """[n, t, width] → scores [n, t, vocab] of each original token."""

    cuts: ClassVar[dict[str, str]] = {"out": "vocab"}

    def __init__(self, config: Config, tied_to: nn.Embedding | None):
        super().__init__()
        self.dense, self.norm = linear(config.width, config.width), nn.LayerNorm(config.width, config.epsilon)
        self.out = linear(config.width, config.vocab) if tied_to is None else TiedOutput(tied_to, bias=True)
        self.activation = config.activation

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.out(self.norm(_activated(self.dense(x), self.activation)))


def _activated(x: paddle.Tensor, activation: str) -> paddle.Tensor:
    return F.relu(x) if activation == "relu" else F.gelu(x)


class BERT(Chain):
    """Scores [n, t, vocab] of each token before masking, for tokens int64 [n, t]."""

    # Names in the first published weights.
    hugging_face_versions: ClassVar[dict[str, str]] = {"*.gamma": "*.weight", "*.beta": "*.bias"}
    paddle_nlp: ClassVar[dict[str, str]] = {
        "*.embeddings.LayerNorm.*": "*.embeddings.layer_norm.*",
        "*.encoder.layer.*.attention.self.query.*": "*.encoder.layers.*.self_attn.q_proj.*",
        "*.encoder.layer.*.attention.self.key.*": "*.encoder.layers.*.self_attn.k_proj.*",
        "*.encoder.layer.*.attention.self.value.*": "*.encoder.layers.*.self_attn.v_proj.*",
        "*.encoder.layer.*.attention.output.dense.*": "*.encoder.layers.*.self_attn.out_proj.*",
        "*.encoder.layer.*.attention.output.LayerNorm.*": "*.encoder.layers.*.norm1.*",
        "*.encoder.layer.*.intermediate.dense.*": "*.encoder.layers.*.linear1.*",
        "*.encoder.layer.*.output.dense.*": "*.encoder.layers.*.linear2.*",
        "*.encoder.layer.*.output.LayerNorm.*": "*.encoder.layers.*.norm2.*",
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
        self.family, self.has_tasks = config.family, config.tasks > 0

    def hugging_face(self) -> Names:
        """The names of the tensors in transformers' BertForMaskedLM or ErnieForMaskedLM."""
        last, head, first = len(self.blocks) - 1, "cls.predictions", f"{self.family}.embeddings"
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
        if self.has_tasks:
            names["blocks.0.task"] = f"{first}.task_type_embeddings.weight"
        for word in ("weight", "bias"):
            names |= {
                f"blocks.0.norm.{word}": f"{first}.LayerNorm.{word}",
                f"blocks.{last}.norm.{word}": f"{head}.transform.LayerNorm.{word}",
            }
        norms = ("attention.output.LayerNorm", "output.LayerNorm")
        for n in range(last - 1):
            block = f"{self.family}.encoder.layer.{n}"
            names |= encoder_names(f"blocks.{n + 1}", block, "attention.self", norms, self.head_width)
        unused = ("*embeddings.position_ids", f"{self.family}.pooler.*", "pooler.*", "cls.seq_relationship.*")
        twice = (f"{head}.decoder.weight", f"{head}.decoder.bias") if self.tied else (f"{head}.bias",)
        return {**names, "": (*unused, *twice)}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Attention weights are never dropped."""

    causal: ClassVar[bool] = False  # for `paddle-dp plan`: attention goes both ways

    hugging_face: ClassVar[dict[str, Any]] = {
        "sizes": {
            "vocab_size": "vocab", "hidden_size": "width", "num_hidden_layers": "depth",
            "num_attention_heads": "heads", "intermediate_size": "hidden", "max_position_embeddings": "length",
            "type_vocab_size": "segments", "layer_norm_eps": "epsilon", "tie_word_embeddings": "tied",
            "hidden_dropout_prob": "dropout", "hidden_act": "activation", "task_type_vocab_size": "tasks",
        },
        "words": {"activation": {"gelu": "gelu", "relu": "relu"}},
        "switched": {"task_type_vocab_size": "use_task_id"},
        "must": {"model_type": ("bert", "ernie"), "position_embedding_type": ("absolute",)},
        "absent": {
            "layer_norm_eps": 1e-12, "type_vocab_size": 2, "tie_word_embeddings": True, "hidden_dropout_prob": 0.1,
            "task_type_vocab_size": 3,
        },
        "least": {"segments": 1},
        "types": {
            "bert": {"always": {"family": "bert", "tasks": 0}, "architecture": "BertForMaskedLM"},
            "ernie": {"always": {"family": "ernie"}, "architecture": "ErnieForMaskedLM"},
        },
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

    tasks: int = 0
    """Number of task embeddings, as in ERNIE 2.0 and 3.0; texts use the first. 0: none."""

    hidden: int | None = None
    """Width inside the MLP; 4 × `width` by default."""

    activation: Literal["gelu", "relu"] = "gelu"
    """Of the MLP and of the output layer; `relu` as in ERNIE 1.0."""

    epsilon: float = 1e-5
    """Added to the variance in LayerNorm."""

    dropout: float = 0.0
    """Dropout probability of the embedding and of each layer's output."""

    tied: bool = False
    """The output layer uses the embedding's weights, and a separate bias."""

    family: Literal["bert", "ernie"] = "bert"
    """The family by whose names published weights are read and written."""

    def __post_init__(self) -> None:
        at_least_one(self, "vocab", "width", "depth", "heads", "length")
        divides(self, "heads", "width")
        for name in ("segments", "tasks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 0")
        check_hidden_and_epsilon(self)
        check_dropout(self)

    def build(self) -> nn.Layer:
        return BERT(self)
