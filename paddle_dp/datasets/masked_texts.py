"""Text files as windows of tokens with some masked, for masked language modelling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.datasets._arrays import Array
from paddle_dp.datasets._packing import IGNORED
from paddle_dp.datasets._windows import TextConfig, Windows
from paddle_dp.units import Count, Probability


class MaskedWindows:
    """Windows of `texts`; a share of each window's tokens, at least one, is chosen as targets.

    80 % of these become `mask`, 10 % a random token, and 10 % stay (Devlin et al., arXiv:1810.04805). Training chooses
    again in every epoch with NumPy's global generator, which the loader seeds by (seed, epoch, sample). `fixed` keeps
    the choice, for held-out samples.
    """

    def __init__(self, texts: Windows, share: float, mask: int, fixed: bool):
        self.texts, self.share, self.mask, self.fixed = texts, share, mask, fixed

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        tokens, _ = self.texts[index]
        random = np.random.default_rng(index if self.fixed else np.random.randint(2**31))
        chosen = random.permutation(len(tokens))[: max(1, round(self.share * len(tokens)))]
        targets = np.full_like(tokens, IGNORED)
        targets[chosen] = tokens[chosen]
        masked, changed = np.split(chosen, [round(0.8 * len(chosen))])
        tokens[masked] = self.mask
        changed = changed[: -(-len(changed) // 2)]
        tokens[changed] = random.integers(0, self.texts.tokenizer.vocab, len(changed))
        return tokens, targets


@dataclass(frozen=True, kw_only=True)
class Config(TextConfig):
    """The loss needs `ignore_index: -100`."""

    masked: Probability = 0.15
    """Share of the tokens of every window that are to be predicted."""

    mask: Count | None = None
    """The mask token; by default one more than the tokenizer's last, so the model's vocab must be one larger."""

    def build(self, split: str) -> MaskedWindows:
        """Inputs int64 [length]; targets int64 [length], -100 where no token is to be predicted."""
        texts = self.windows(split)
        mask = texts.tokenizer.vocab if self.mask is None else self.mask
        return MaskedWindows(texts, self.masked, mask, fixed=split == "test")
