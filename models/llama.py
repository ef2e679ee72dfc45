"""Llama: a decoder-only transformer with RMSNorm, rotary positions, SwiGLU and grouped-query attention.

Mistral, SmolLM2, Qwen2, Qwen3 and ERNIE 4.5 are Llamas with other settings: biases, norms of q and k, another head
width, other pairs that are rotated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal

from models._attention import attention
from models._chain import DocumentChain, Hidden, joined, split
from models._checks import at_least_one, check_epsilon, divides
from models._generate import Cache, Generates
from models._names import Names
from models._scale import scaled
from models._transformer import STD, Head, TiedOutput, linear, residual_std


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Frequencies of the rotary positions. Llama 3.1 and others lower the low ones for longer texts."""

    base: float = 10000.0
    scaling: str | None = None
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_length: int = 8192
    interleaved: bool = False

    def frequencies(self, half: int, dtype: str) -> paddle.Tensor:
        """[half] frequencies, in radians per token. `linear` divides all of them (Chen et al., arXiv:2306.15595).
        `llama3` divides frequencies with wavelengths above original_length / low, keeps wavelengths below
        original_length / high, and interpolates in between (Llama Team, arXiv:2407.21783; transformers'
        modeling_rope_utils)."""
        plain = self.base ** (-paddle.arange(half, dtype=dtype) / half)
        if self.scaling is None:
            return plain
        slow = plain / self.factor
        if self.scaling == "linear":
            return slow
        turns = plain * (self.original_length / (2 * math.pi))  # in the original length
        kept = ((turns - self.low) / (self.high - self.low)).clip(0.0, 1.0)
        return kept * plain + (1 - kept) * slow


def rotate(
    x: paddle.Tensor, rope: Rope, start: int = 0, positions: paddle.Tensor | None = None
) -> paddle.Tensor:
    """[n, t, heads, head_width] with rotary positions (Su et al., arXiv:2104.09864): `positions` int64 [n, t], by
    default counted from `start` for the first token.

    Products of two vectors then depend on their distance only. The pairs that are rotated are element i of the first
    half of a head and element i of the second half, as in Llama's published weights; with `rope.interleaved` elements
    2i and 2i + 1, as in ERNIE's (transformers' modeling_ernie4_5).
    """
    half = x.shape[-1] // 2
    wide = "float64" if x.dtype == paddle.float64 else "float32"
    numbers = (
        paddle.arange(start, start + x.shape[1], dtype=wide) if positions is None else positions.astype(wide)
    )
    angles = numbers.unsqueeze(-1) * rope.frequencies(half, wide)
    angles = angles.unsqueeze(-2)  # [t, 1, half] or [n, t, 1, half]
    cos, sin = angles.cos().astype(x.dtype), angles.sin().astype(x.dtype)
    if rope.interleaved:
        first, second = x.reshape([0, 0, -1, half, 2]).unbind(-1)
        pairs = paddle.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return pairs.flatten(3)
    first, second = x.split(2, axis=-1)
    return paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)


class RMSNorm(nn.Layer):
    """[…, width] scaled to a mean square of 1, in float32 at least (Zhang and Sennrich, arXiv:1910.07467)."""

    def __init__(self, width: int, epsilon: float = 1e-5):
        super().__init__()
        self.weight = self.create_parameter([width], default_initializer=nn.initializer.Constant(1.0))
        self.epsilon = epsilon

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        wide = x if x.dtype == paddle.float64 else x.astype("float32")
        scale = ((wide * wide).mean(-1, keepdim=True) + self.epsilon).rsqrt()
        return scaled((wide * scale).astype(x.dtype), self.weight)


class Embedding(nn.Layer):
    """Tokens int64 [n, t] → [n, t, width]; positions are added in attention. See DocumentChain."""

    cuts: ClassVar[dict[str, str]] = {"token": "vocab"}

    def __init__(self, config: Config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width, weight_attr=Normal(0.0, STD))

    def forward(
        self, tokens: paddle.Tensor, cache: Cache | None = None, positions: paddle.Tensor | None = None
    ) -> Hidden:
        return joined(self.token(tokens), positions)


class Block(nn.Layer):
    """[n, t, width] → the same: causal self-attention, then a SwiGLU MLP.

    `group_size` heads of q share one head of k and v. The number of heads is read from the tensors; `head_width` is the
    width of each. With `qk_norm` each head of q and k is normalized before its rotation (Dehghani et al.,
    arXiv:2302.05442). Only the methods in `attention_methods` mix tokens.
    """

    cuts: dict[str, str] = {  # noqa: RUF012 - as a class's table, to which an instance may add
        "q": "heads", "k": "heads", "v": "heads", "out": "rowwise",
        "gate": "colwise", "up": "colwise", "down": "rowwise",
    }  # fmt: skip
    attention_methods: ClassVar[tuple[str, ...]] = ("_attend",)

    def __init__(self, config: Config):
        super().__init__()
        width, hidden, std = config.width, config.hidden, residual_std(config.depth)
        self.head_width = config.head_width or width // config.heads
        self.group_size, queries = config.heads // config.kv_heads, config.heads * self.head_width
        self.rope, bias = config.rope, config.bias is not None
        self.norm1, self.norm2 = RMSNorm(width, config.epsilon), RMSNorm(width, config.epsilon)
        self.q = linear(width, queries, bias=bias)
        self.out = linear(queries, width, std, config.bias == "qkvo")
        self.k, self.v = (linear(width, config.kv_heads * self.head_width, bias=bias) for _ in range(2))
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.head_width, config.epsilon) for _ in range(2))
            self.cuts = {**self.cuts, "q_norm": "per_head", "k_norm": "per_head"}
        self.gate, self.up = linear(width, hidden, bias=False), linear(width, hidden, bias=False)
        self.down = linear(hidden, width, std, bias=False)

    def forward(self, hidden: Hidden, cache: Cache | None = None) -> Hidden:
        x, positions = split(hidden)
        y = self.norm1(x)
        x = x + self.out(self._attend(self.q(y), self.k(y), self.v(y), cache, positions))
        y = self.norm2(x)
        return joined(x + self.down(F.silu(self.gate(y)) * self.up(y)), positions)

    def _attend(
        self,
        q: paddle.Tensor,
        k: paddle.Tensor,
        v: paddle.Tensor,
        cache: Cache | None,
        positions: paddle.Tensor | None = None,
    ) -> paddle.Tensor:
        q, k, v = (x.reshape([0, 0, -1, self.head_width]) for x in (q, k, v))  # -1: the heads on this rank
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        start = cache.start if cache else 0
        q, k = (rotate(x, self.rope, start, positions) for x in (q, k))
        if cache:
            k, v = cache.extend(self, k, v)
        if self.group_size > 1:
            # Repeats each head `group_size` times, side by side. repeat_interleave gives the same bits, but paddle2onnx
            # 2.1 exports it as a Tile that onnxruntime refuses.
            k = paddle.concat([k] * self.group_size, -1).reshape([0, 0, -1, self.head_width])
            v = paddle.concat([v] * self.group_size, -1).reshape([0, 0, -1, self.head_width])
        causal = cache is None or q.shape[1] > 1  # a single new token follows all others
        return attention(q, k, v, causal, positions)


class Llama(Generates, DocumentChain):
    """Scores [n, t, vocab] of each next token, for tokens int64 [n, t]; made for t up to `length`."""

    def __init__(self, config: Config):
        blocks = [Block(config) for _ in range(config.depth)]
        embedding = Embedding(config)
        out = TiedOutput(embedding.token) if config.tied else linear(config.width, config.vocab, bias=False)
        super().__init__([embedding, *blocks, Head(RMSNorm(config.width, config.epsilon), out)])
        self.length, self.tied = config.length, config.tied
        self.bias, self.qk_norm = config.bias, config.qk_norm
        self.paddle_nlp = {"model.*": "qwen2.*" if config.bias == "qkv" else "llama.*"}
        self.paddle_formers: dict[str, str] = {}  # the names of transformers

    def hugging_face(self) -> Names:
        """The names of the tensors in transformers' LlamaForCausalLM, and in its Qwen2, Qwen3 and Ernie4_5."""
        last = len(self.blocks) - 1
        names: Names = {
            "blocks.0.token.weight": "model.embed_tokens.weight",
            f"blocks.{last}.norm.weight": "model.norm.weight",
            f"blocks.{last}.out.weight": "model.embed_tokens.weight" if self.tied else "lm_head.weight.T",
        }
        for n in range(last - 1):
            ours, theirs = f"blocks.{n + 1}", f"model.layers.{n}"
            names |= {
                f"{ours}.norm1.weight": f"{theirs}.input_layernorm.weight",
                f"{ours}.q.weight": f"{theirs}.self_attn.q_proj.weight.T",
                f"{ours}.k.weight": f"{theirs}.self_attn.k_proj.weight.T",
                f"{ours}.v.weight": f"{theirs}.self_attn.v_proj.weight.T",
                f"{ours}.out.weight": f"{theirs}.self_attn.o_proj.weight.T",
                f"{ours}.norm2.weight": f"{theirs}.post_attention_layernorm.weight",
                f"{ours}.gate.weight": f"{theirs}.mlp.gate_proj.weight.T",
                f"{ours}.up.weight": f"{theirs}.mlp.up_proj.weight.T",
                f"{ours}.down.weight": f"{theirs}.mlp.down_proj.weight.T",
            }
            biased = {"qkv": ("q", "k", "v"), "qkvo": ("q", "k", "v", "out")}.get(self.bias or "", ())
            names |= {f"{ours}.{x}.bias": f"{theirs}.self_attn.{x[0]}_proj.bias" for x in biased}
            normed = ("q_norm", "k_norm") if self.qk_norm else ()
            names |= {f"{ours}.{x}.weight": f"{theirs}.self_attn.{x}.weight" for x in normed}
        unused = ("*.rotary_emb.inv_freq",)
        return {**names, "": (*unused, "lm_head.weight") if self.tied else unused}


# Qwen's keys: attention may see a window of the last tokens, in layers of that type.
_WINDOW = ("attention_dropout", "sliding_window", "max_window_layers")
_NO_WINDOW = {"use_sliding_window": (False,), "layer_types": (None, ["full_attention"])}
_PLAIN = {"qk_norm": False, "rope_interleaved": False}


@dataclass(frozen=True, kw_only=True)
class Config:
    hugging_face: ClassVar[dict[str, Any]] = {
        "sizes": {
            "vocab_size": "vocab", "hidden_size": "width", "num_hidden_layers": "depth",
            "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "intermediate_size": "hidden",
            "max_position_embeddings": "length", "rms_norm_eps": "epsilon", "rope_theta": "rope_base",
            "rope_scaling.rope_type": "rope_scaling", "rope_scaling.factor": "rope_factor",
            "rope_scaling.low_freq_factor": "rope_low", "rope_scaling.high_freq_factor": "rope_high",
            "rope_scaling.original_max_position_embeddings": "rope_original_length", "tie_word_embeddings": "tied",
            "attention_bias": "bias", "head_dim": "head_width",
        },
        "also": {  # synonyms in other versions
            "rope_scaling_type": "rope_scaling.rope_type", "rope_scaling_factor": "rope_scaling.factor",  # PaddleNLP's
            "rope_scaling.type": "rope_scaling.rope_type", "rope_parameters.rope_type": "rope_scaling.rope_type",
            "rope_parameters.rope_theta": "rope_theta", "rope_scaling.rope_theta": "rope_theta",
            "rope_parameters.factor": "rope_scaling.factor",
            "rope_parameters.low_freq_factor": "rope_scaling.low_freq_factor",
            "rope_parameters.high_freq_factor": "rope_scaling.high_freq_factor",
            "rope_parameters.original_max_position_embeddings": "rope_scaling.original_max_position_embeddings",
        },
        "words": {
            "rope_scaling": {"default": None, "linear": "linear", "llama3": "llama3"},
            "bias": {False: None, True: "qkvo"},
        },
        "must": {
            "model_type": ("llama", "mistral", "qwen2", "qwen3", "ernie4_5"), "hidden_act": ("silu", "swish"),
            "pretraining_tp": (1,),
        },
        "absent": {
            "num_key_value_heads": "num_attention_heads", "rope_theta": 10000.0, "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 2048,
        },
        "computed": {"head_dim": "hidden_size / num_attention_heads"},
        "types": {
            "llama": {"always": {**_PLAIN}, "architecture": "LlamaForCausalLM"},
            "qwen2": {
                "always": {**_PLAIN, "bias": "qkv"}, "must": _NO_WINDOW, "unused": _WINDOW,
                "absent": {"max_position_embeddings": 32768},
                "needs": ("num_key_value_heads",), "architecture": "Qwen2ForCausalLM",
            },
            "qwen3": {
                "always": {**_PLAIN, "qk_norm": True}, "must": _NO_WINDOW, "unused": _WINDOW,
                "absent": {"max_position_embeddings": 32768, "head_dim": 128},
                "needs": ("num_key_value_heads",), "architecture": "Qwen3ForCausalLM",
            },
            "mistral": {
                "always": {**_PLAIN, "bias": None}, "absent": {"max_position_embeddings": 131072},
                "needs": ("sliding_window", "num_key_value_heads"), "architecture": "MistralForCausalLM",
            },
            # Its use_bias is refused: transformers' norms have none then, PaddleFormers' and ERNIEKit's may.
            "ernie4_5": {
                "always": {"qk_norm": False, "bias": None, "rope_interleaved": True},
                "must": {"use_rmsnorm": (None, True), "compression_ratio": (None, 1), "scale_qk_coeff": (None, 1)},
                "absent": {"max_position_embeddings": 131072, "tie_word_embeddings": True},
                "needs": ("num_key_value_heads", "head_dim", "rope_theta", "rms_norm_eps"),
                "architecture": "Ernie4_5ForCausalLM",
            },
        },
        "unused": ("attention_dropout",),
    }  # fmt: skip

    vocab: int = 256
    """Tokens of the vocabulary."""

    width: int = 128
    """Width of a token between the blocks."""

    depth: int = 4
    """Number of blocks."""

    heads: int = 4
    """Attention heads of the queries; must divide `width`, unless `head_width` is set."""

    kv_heads: int = 2
    """Heads of keys and values, each shared by `heads` / `kv_heads` of the queries'; must divide `heads`."""

    head_width: int | None = None
    """Width of a head; `width` / `heads` by default."""

    bias: Literal["qkv", "qkvo"] | None = None
    """Biases in attention: of q, k and v as in Qwen2, or of its output layer, too."""

    qk_norm: bool = False
    """Normalizes each head of q and k by an RMSNorm, as Qwen3."""

    hidden: int = 352
    """Width inside the SwiGLU MLP."""

    length: int = 128
    """Longest text, in tokens."""

    rope_base: float = 10000.0
    """Base of the rotary embedding's wavelengths."""

    rope_interleaved: bool = False
    """Rotates neighbouring elements of a head, as ERNIE 4.5; by default elements half a head apart."""

    rope_scaling: Literal["linear", "llama3"] | None = None
    """Lowers the frequencies for texts longer than in the first training: `linear` divides all by `rope_factor`;
    `llama3` only the low ones, as Llama 3.1 to 3.3."""

    rope_factor: float = 1.0
    """Divisor of the lowered frequencies."""

    rope_low: float = 1.0
    """`llama3`: frequencies with fewer turns in `rope_original_length` are divided fully."""

    rope_high: float = 4.0
    """`llama3`: frequencies with more turns are kept."""

    rope_original_length: int = 8192
    """`llama3`: the length of texts in the first training, in tokens."""

    epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""

    tied: bool = False
    """The output layer uses the embedding's weights."""

    def __post_init__(self) -> None:
        at_least_one(self, "vocab", "width", "depth", "heads", "kv_heads", "hidden", "length", "rope_base")
        if self.head_width is None:
            divides(self, "heads", "width")
        else:
            at_least_one(self, "head_width")
        if (wide := self.head_width or self.width // self.heads) % 2:
            of_width = "" if self.head_width else f" of width {self.width}"
            raise ValueError(
                f"heads: {self.heads}{of_width} are {wide} wide, and rotary positions need an even width: choose "
                f"another {'head_width' if self.head_width else 'heads or width'}"
            )
        divides(self, "kv_heads", "heads")
        check_epsilon(self)
        at_least_one(self, "rope_factor", "rope_original_length")
        if not 0 < self.rope_low < self.rope_high:
            raise ValueError(f"rope_low: {self.rope_low} is not from 0 to below rope_high {self.rope_high}")

    @property
    def rope(self) -> Rope:
        return Rope(**{field.name: getattr(self, f"rope_{field.name}") for field in fields(Rope)})

    def build(self) -> nn.Layer:
        return Llama(self)
