"""The shipped models in plain PyTorch, of the same sizes, for beside_torch.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[n, t, heads · head_width] → [n, heads, t, head_width]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Block(nn.Module):
    """GPT's block, where `causal`, or ViT's."""

    def __init__(self, width: int, heads: int, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        approximate = "tanh" if self.causal else "none"
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=approximate))


class LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.heads, self.kv_heads, narrow = heads, kv_heads, width // heads * kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.q, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q = split(self.q(y), self.heads)
        k = split(self.k(y), self.kv_heads)
        v = split(self.v(y), self.kv_heads)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[n, heads, t, head_width] with rotary positions."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Embedding(nn.Module):
    def __init__(self, vocab: int, width: int, length: int):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.randn(length, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position


class Patches(nn.Module):
    def __init__(self, image: int, patch: int, width: int):
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(torch.randn((image // patch) ** 2, width))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.patch(images).flatten(2).transpose(1, 2) + self.position


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


class Residual(nn.Module):
    """ResNet-18's block."""

    def __init__(self, narrow: int, wide: int):
        super().__init__()
        stride = 1 + (narrow < wide)
        self.body = nn.Sequential(
            nn.Conv2d(narrow, wide, 3, stride, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU(),
            nn.Conv2d(wide, wide, 3, 1, 1, bias=False), nn.BatchNorm2d(wide),
        )  # fmt: skip
        cut = nn.Sequential(nn.Conv2d(narrow, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
        self.short = cut if narrow < wide else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


def mlp(inputs: int, hidden: tuple[int, int], classes: int, activation: str) -> nn.Module:
    assert activation == "gelu"
    (one, two), last = hidden, nn.Linear(hidden[1], classes)
    return nn.Sequential(nn.Linear(inputs, one), nn.GELU(), nn.Linear(one, two), nn.GELU(), last)


def resnet(depth: int, classes: int) -> nn.Module:
    assert depth == 18
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    widths = [(64, 64), (64, 128), (128, 256), (256, 512)]
    blocks = [block for narrow, wide in widths for block in (Residual(narrow, wide), Residual(wide, wide))]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def gpt(vocab: int, width: int, depth: int, heads: int, length: int) -> nn.Module:
    blocks = [Block(width, heads, causal=True) for _ in range(depth)]
    head = [nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)]
    return nn.Sequential(Embedding(vocab, width, length), *blocks, *head)


def llama(  # noqa: PLR0913 - as the shipped Config
    vocab: int, width: int, depth: int, heads: int, kv_heads: int, hidden: int, length: int
) -> nn.Module:
    blocks = [LlamaBlock(width, heads, kv_heads, hidden) for _ in range(depth)]
    head = [nn.RMSNorm(width, 1e-5), nn.Linear(width, vocab, bias=False)]
    return nn.Sequential(nn.Embedding(vocab, width), *blocks, *head)


def vit(image: int, patch: int, classes: int, width: int, depth: int, heads: int) -> nn.Module:
    blocks = [Block(width, heads, causal=False) for _ in range(depth)]
    head = [nn.LayerNorm(width), Mean(), nn.Linear(width, classes)]
    return nn.Sequential(Patches(image, patch, width), *blocks, *head)


def built(name: str, size: dict[str, Any]) -> nn.Module:
    """The model of this name; `size` is what the shipped model's Config is given."""
    models: dict[str, Any] = {"mlp": mlp, "resnet": resnet, "gpt": gpt, "llama": llama, "vit": vit}
    model: nn.Module = models[name](**size)
    return model
