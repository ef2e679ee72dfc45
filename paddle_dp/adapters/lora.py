"""LoRA: adds the product of two thin matrices to each chosen Linear (Hu et al., arXiv:2106.09685)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paddle_dp.errors import Mistake, RecipeError, UsageError
from paddle_dp.units import AboveZero, Positive

if TYPE_CHECKING:
    from paddle import nn


@dataclass(frozen=True, kw_only=True)
class Config:
    match: tuple[str, ...] = ()
    """Patterns of the names of the Linear layers: `*.q`, `blocks.0.*`; `*` matches anything."""

    rank: Positive | None = None
    """Columns of A and rows of B; a weight becomes weight + `alpha` / `rank` × A B. 8 by default, or as in `load`."""

    alpha: AboveZero | None = None
    """Strength of the added product, `alpha` / `rank`: another `rank` needs no other learning rate. 16 by default, or
    as in `load`."""

    load: str | None = None
    """A folder of PEFT's: its adapter is trained on, and has its layers, `rank` and `alpha`
    ([fine-tuning.md](fine-tuning.md))."""

    def __post_init__(self) -> None:
        if self.load is None and not self.match:
            raise ValueError("match: is empty: name the Linear layers, such as ['*.q', '*.v']")
        if self.load is not None and self.match:
            raise ValueError("match: load names the layers: leave it out")
        # A run's own recipe has both, and is read where the folder is gone.
        sizes = None if self.rank and self.alpha else self._sizes()
        for name, size in zip(("rank", "alpha"), sizes or (), strict=False):
            if getattr(self, name) is None:
                object.__setattr__(self, name, size)

    def _sizes(self) -> tuple[int, float]:
        """The rank and alpha that `load` has, or the defaults."""
        if self.load is None:
            return 8, 16.0
        from paddle_dp.checkpoint.peft import read_sizes

        try:
            return read_sizes(Path(self.load).expanduser())
        except UsageError as error:
            raise ValueError(str(error).removeprefix("adapter.")) from None

    def build(self, model: nn.Layer, seed: int) -> nn.Layer:
        from paddle_dp.core.lora import add_low_rank

        assert self.rank is not None and self.alpha is not None
        scale = self.alpha / self.rank
        if self.load is None:
            return add_low_rank(model, self.match, self.rank, scale, seed)
        from paddle_dp.checkpoint.peft import read_factors, read_sizes

        folder = Path(self.load).expanduser()
        try:
            for name, size in zip(("rank", "alpha"), read_sizes(folder), strict=True):
                if size != getattr(self, name):
                    raise UsageError(
                        f"adapter.{name}: {getattr(self, name)} is not that of {folder}, {size}."
                    )
            values = read_factors(folder, model, self.rank)
        except UsageError as error:
            path = ("adapter", "load")
            raise RecipeError([Mistake(where="", message=str(error), path=path)]) from None
        layers = tuple(dict.fromkeys(name.rpartition(".")[0] for name in values))
        return add_low_rank(model, layers, self.rank, scale, seed, values)
