"""GPT-2: a decoder-only transformer with learned positions, pre-norm (Radford et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal

from models import _transformer
from models._attention import attention
from models._chain import DocumentChain, Hidden, joined, split
from models._checks import at_least_one, check_dropout, check_hidden_and_epsilon, check_length, divides
from models._generate import Cache, Generates
from models._names import Names
from models._transformer import STD, Head, TiedOutput, linear, residual_std


class Embedding(nn.Layer):
    """Tokens int64 [n, t] → [n, t, width]: token and position embeddings, added. With positions: see DocumentChain."""

    cuts: ClassVar[dict[str, str]] = {"token": "vocab"}

    def __init__(self, config: Config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width, weight_attr=Normal(0.0, STD))
        self.position = self.create_parameter(
            [config.length, config.width], default_initializer=Normal(0.0, STD)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, tokens: paddle.Tensor, cache: Cache | None = None, positions: paddle.Tensor | None = None
    ) -> Hidden:
        if positions is None:
            start = cache.start if cache else 0
            return self.dropout(self.token(tokens) + self.position[start : start + tokens.shape[1]])
        check_length(tokens, self.position.shape[0])
        return self.dropout(self.token(tokens) + F.embedding(positions, self.position)), positions


class Block(_transformer.Block):
    """[n, t, width] → the same: causal self-attention, then an MLP."""

    def __init__(self, config: Config):
        super().__init__(config, residual_std(config.depth))

    def forward(self, hidden: Hidden, cache: Cache | None = None) -> Hidden:
        x, positions = split(hidden)
        x = x + self.dropout(self.out(self._attend(self.qkv(self.norm1(x)), cache, positions)))
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate=True)))
        return joined(x, positions)

    def _attend(
        self, qkv: paddle.Tensor, cache: Cache | None = None, positions: paddle.Tensor | None = None
    ) -> paddle.Tensor:
        q, k, v = qkv.reshape([0, 0, -1, 3 * self.head_width]).split(3, axis=-1)  # -1: the heads on this rank
        if cache:
            k, v = cache.extend(self, k, v)
        causal = cache is None or q.shape[1] > 1  # a single new token follows all others
        return attention(q, k, v, causal, positions)


class GPT(Generates, DocumentChain):
    """Scores [n, t, vocab] of each next token, for tokens int64 [n, t], t at most `length`."""

    paddle_nlp: ClassVar[dict[str, str | tuple[str, ...]]] = {
        "transformer.wte.weight": "gpt.embeddings.word_embeddings.weight",
        "transformer.wpe.weight": "gpt.embeddings.position_embeddings.weight",
        "transformer.ln_f.*": "gpt.decoder.norm.*",
        "transformer.h.*.ln_1.*": "gpt.decoder.layers.*.norm1.*",
        "transformer.h.*.ln_2.*": "gpt.decoder.layers.*.norm2.*",
        "transformer.h.*.attn.c_attn.*": tuple(f"gpt.decoder.layers.*.self_attn.{x}_proj.*" for x in "qkv"),
        "transformer.h.*.attn.c_proj.*": "gpt.decoder.layers.*.self_attn.out_proj.*",
        "transformer.h.*.mlp.c_fc.*": "gpt.decoder.layers.*.linear1.*",
        "transformer.h.*.mlp.c_proj.*": "gpt.decoder.layers.*.linear2.*",
    }

    def __init__(self, config: Config):
        embedding = Embedding(config)
        blocks = [Block(config) for _ in range(config.depth)]
        out = TiedOutput(embedding.token) if config.tied else linear(config.width, config.vocab, bias=False)
        super().__init__([embedding, *blocks, Head(nn.LayerNorm(config.width, config.epsilon), out)])
        self.length, self.head_width, self.tied = config.length, config.width // config.heads, config.tied

    def hugging_face(self) -> Names:
        """The names of the tensors in transformers' GPT2LMHeadModel, whose Conv1D is [inputs, outputs] as ours."""
        last = len(self.blocks) - 1
        names: Names = {
            "blocks.0.token.weight": "transformer.wte.weight",
            "blocks.0.position": "transformer.wpe.weight",
            f"blocks.{last}.out.weight": "transformer.wte.weight" if self.tied else "lm_head.weight.T",
        }
        for word in ("weight", "bias"):
            names[f"blocks.{last}.norm.{word}"] = f"transformer.ln_f.{word}"
            for n in range(last - 1):
                ours, theirs = f"blocks.{n + 1}", f"transformer.h.{n}"
                names |= {
                    f"{ours}.norm1.{word}": f"{theirs}.ln_1.{word}",
                    f"{ours}.qkv.{word}": ((f"{theirs}.attn.c_attn.{word}",), self.head_width),
                    f"{ours}.out.{word}": f"{theirs}.attn.c_proj.{word}",
                    f"{ours}.norm2.{word}": f"{theirs}.ln_2.{word}",
                    f"{ours}.up.{word}": f"{theirs}.mlp.c_fc.{word}",
                    f"{ours}.down.{word}": f"{theirs}.mlp.c_proj.{word}",
                }
        masks = ("h.*.attn.bias", "*.h.*.attn.bias", "h.*.attn.masked_bias", "*.h.*.attn.masked_bias")
        return {**names, "": (*masks, "lm_head.weight") if self.tied else masks}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Attention weights are never dropped."""

    hugging_face: ClassVar[dict[str, Any]] = {
        "sizes": {
            "vocab_size": "vocab", "n_embd": "width", "n_layer": "depth", "n_head": "heads", "n_positions": "length",
            "n_inner": "hidden", "layer_norm_epsilon": "epsilon", "tie_word_embeddings": "tied",
            "resid_pdrop": "dropout",
        },
        "also": {  # PaddleNLP's
            "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions", "intermediate_size": "n_inner",
            "layer_norm_eps": "layer_norm_epsilon", "hidden_dropout_prob": "resid_pdrop",
            "hidden_activation": "activation_function", "hidden_act": "activation_function",
        },
        "must": {
            "model_type": ("gpt2", "gpt"), "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,), "embd_pdrop": ("as resid_pdrop",),
        },
        "absent": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_inner": None, "resid_pdrop": 0.1},
        "types": {
            "gpt2": {"architecture": "GPT2LMHeadModel"},
            # PaddleNLP's: its "gelu" is approximated by tanh, too, and its norms add 1e-5, whatever the key says.
            "gpt": {
                "always": {"epsilon": 1e-5, "tied": True}, "architecture": "GPTForCausalLM",
                "must": {
                    "activation_function": ("gelu",), "normalize_before": (True,), "scale_qk_coeff": (None, 1),
                    "attention_probs_dropout_prob": ("as resid_pdrop",),
                },
                "unused": (
                    "type_vocab_size", "num_partitions", "ignore_index", "fused_softmax_with_triangular",
                    "use_fast_layer_norm",
                ),
            },
        },
        "unused": ("n_ctx", "summary_*", "attn_pdrop"),
    }  # fmt: skip

    vocab: int = 256
    """Tokens of the vocabulary."""

    width: int = 128
    """Width of a token between the blocks."""

    depth: int = 4
    """Number of blocks."""

    heads: int = 4
    """Attention heads; must divide `width`."""

    length: int = 128
    """Longest text, in tokens."""

    hidden: int | None = None
    """Width inside the MLP; 4 × `width` by default."""

    epsilon: float = 1e-5
    """Added to the variance in LayerNorm."""

    dropout: float = 0.0
    """Dropout probability of the embedding and of each layer's output."""

    tied: bool = False
    """The output layer uses the embedding's weights."""

    def __post_init__(self) -> None:
        at_least_one(self, "vocab", "width", "depth", "heads", "length")
        divides(self, "heads", "width")
        check_hidden_and_epsilon(self)
        check_dropout(self)

    def build(self) -> nn.Layer:
        return GPT(self)
