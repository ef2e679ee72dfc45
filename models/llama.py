"""Llama: a decoder-only transformer with RMSNorm, rotary positions, SwiGLU and grouped-query attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import paddle
import paddle.nn.functional as F
from paddle import nn
from paddle.nn.initializer import Normal

from models._attention import attention
from models._chain import Chain
from models._checks import at_least_one, divides
from models._generate import Cache, Generates
from models._transformer import STD, linear, residual_std


def rotate(x: paddle.Tensor, base: float, start: int = 0) -> paddle.Tensor:
    """[n, t, heads, head_width] with rotary positions, `start` for the first token (Su et al., arXiv:2104.09864).

    Products of two vectors then depend on their distance only. The pairs that are rotated are element i of the first
    half of a head and element i of the second half, as in the published weights.
    """
    half = x.shape[-1] // 2
    wide = "float64" if x.dtype == paddle.float64 else "float32"
    frequencies = base ** (-paddle.arange(half, dtype=wide) / half)
    positions = paddle.arange(start, start + x.shape[1], dtype=wide)
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(1)  # [t, 1, half]
    cos, sin = angles.cos().astype(x.dtype), angles.sin().astype(x.dtype)
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
        return (wide * scale).astype(x.dtype) * self.weight


class Embedding(nn.Layer):
    """Tokens int64 [n, t] → [n, t, width]; positions are added in attention."""

    cuts: ClassVar[dict[str, str]] = {"token": "vocab"}

    def __init__(self, config: Config):
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.width, weight_attr=Normal(0.0, STD))

    def forward(self, tokens: paddle.Tensor, cache: Cache | None = None) -> paddle.Tensor:
        return self.token(tokens)


class Block(nn.Layer):
    """[n, t, width] → the same: causal self-attention, then a SwiGLU MLP.

    `group_size` heads of q share one head of k and v. The number of heads is read from the tensors; `head_width` is the
    width of each. Only the methods in `attention_methods` mix tokens.
    """

    cuts: ClassVar[dict[str, str]] = {
        "q": "heads", "k": "heads", "v": "heads", "out": "rowwise",
        "gate": "colwise", "up": "colwise", "down": "rowwise",
    }  # fmt: skip
    attention_methods: ClassVar[tuple[str, ...]] = ("_attend",)

    def __init__(self, config: Config):
        super().__init__()
        width, hidden, std = config.width, config.hidden, residual_std(config.depth)
        self.head_width, self.group_size = width // config.heads, config.heads // config.kv_heads
        self.base = config.rope_base
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.q, self.out = linear(width, width, bias=False), linear(width, width, std, bias=False)
        self.k, self.v = (linear(width, config.kv_heads * self.head_width, bias=False) for _ in range(2))
        self.gate, self.up = linear(width, hidden, bias=False), linear(width, hidden, bias=False)
        self.down = linear(hidden, width, std, bias=False)

    def forward(self, x: paddle.Tensor, cache: Cache | None = None) -> paddle.Tensor:
        y = self.norm1(x)
        x = x + self.out(self._attend(self.q(y), self.k(y), self.v(y), cache))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def _attend(
        self, q: paddle.Tensor, k: paddle.Tensor, v: paddle.Tensor, cache: Cache | None
    ) -> paddle.Tensor:
        q, k, v = (x.reshape([0, 0, -1, self.head_width]) for x in (q, k, v))  # -1: the heads on this rank
        start = cache.start if cache else 0
        q, k = rotate(q, self.base, start), rotate(k, self.base, start)
        if cache:
            k, v = cache.extend(self, k, v)
        if self.group_size > 1:
            # Each head `group_size` times, side by side. Not repeat_interleave, which gives the same bits: paddle2onnx
            # 2.1 exports it as a Tile that onnxruntime refuses.
            k = paddle.concat([k] * self.group_size, -1).reshape([0, 0, -1, self.head_width])
            v = paddle.concat([v] * self.group_size, -1).reshape([0, 0, -1, self.head_width])
        causal = cache is None or q.shape[1] > 1  # a single new token follows all others
        return attention(q, k, v, causal)


class Head(nn.Layer):
    """[n, t, width] → scores [n, t, vocab]."""

    cuts: ClassVar[dict[str, str]] = {"out": "vocab"}

    def __init__(self, config: Config):
        super().__init__()
        self.norm, self.out = RMSNorm(config.width), linear(config.width, config.vocab, bias=False)

    def forward(self, x: paddle.Tensor, cache: Cache | None = None) -> paddle.Tensor:
        return self.out(self.norm(x))


class Llama(Generates, Chain):
    """Scores [n, t, vocab] of each next token, for tokens int64 [n, t]; made for t up to `length`."""

    def __init__(self, config: Config):
        blocks = [Block(config) for _ in range(config.depth)]
        super().__init__([Embedding(config), *blocks, Head(config)])
        self.length = config.length


@dataclass(frozen=True, kw_only=True)
class Config:
    vocab: int = 256
    """Tokens of the vocabulary."""

    width: int = 128
    """Width of a token between the blocks."""

    depth: int = 4
    """Number of blocks."""

    heads: int = 4
    """Attention heads of the queries; must divide `width`."""

    kv_heads: int = 2
    """Heads of keys and values, each shared by `heads` / `kv_heads` of the queries'; must divide `heads`."""

    hidden: int = 352
    """Width inside the SwiGLU MLP."""

    length: int = 128
    """Longest text, in tokens."""

    rope_base: float = 10000.0
    """Base of the rotary embedding's wavelengths."""

    def __post_init__(self) -> None:
        at_least_one(self, "vocab", "width", "depth", "heads", "kv_heads", "hidden", "length", "rope_base")
        divides(self, "heads", "width")
        if self.width // self.heads % 2:
            raise ValueError(
                f"heads: {self.heads} of width {self.width} are {self.width // self.heads} wide, and rotary positions "
                "need an even width: choose another heads or width"
            )
        divides(self, "kv_heads", "heads")

    def build(self) -> nn.Layer:
        return Llama(self)
