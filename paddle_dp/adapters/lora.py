"""LoRA: adds the product of two thin matrices to each chosen Linear (Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_dp.units import AboveZero, Positive

if TYPE_CHECKING:
    from paddle import nn


@dataclass(frozen=True, kw_only=True)
class Config:
    match: tuple[str, ...]
    """Patterns of the names of the Linear layers: `*.q`, `blocks.0.*`; `*` matches anything."""

    rank: Positive = 8
    """Columns of A and rows of B; a weight becomes weight + `alpha` / `rank` × A B."""

    alpha: AboveZero = 16.0
    """Strength of the added product, `alpha` / `rank`: another `rank` needs no other learning rate."""

    def __post_init__(self) -> None:
        if not self.match:
            raise ValueError("match: is empty: name the Linear layers, such as ['*.q', '*.v']")

    def build(self, model: nn.Layer, seed: int) -> nn.Layer:
        from paddle_dp.core.lora import add_low_rank

        return add_low_rank(model, self.match, self.rank, self.alpha / self.rank, seed)
