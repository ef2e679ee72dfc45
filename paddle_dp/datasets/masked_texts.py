"""Text files as windows of tokens with gaps, each to be filled from both sides (masked language modelling)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paddle_dp.datasets._arrays import Array
from paddle_dp.datasets._windows import TextConfig, Windows
from paddle_dp.units import Count, Probability

KEPT = -100  # the target of a token that is not masked: loss.ignore_index


class Gaps:
    """Windows of `texts`; of every sample, a share of the tokens is chosen, at least one: they are the targets.

    Of the chosen, 80 % become `mask`, 10 % another token, and 10 % stay (Devlin et al., arXiv:1810.04805). In training
    they are chosen anew in every epoch, from NumPy's global generator, which the loader seeds by (seed, epoch,
    sample); held-out samples have the same gaps always.
    """

    def __init__(self, texts: Windows, share: float, mask: int, fixed: bool):
        self.texts, self.share, self.mask, self.fixed = texts, share, mask, fixed

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        tokens, _ = self.texts[index]
        random = np.random.default_rng(index if self.fixed else np.random.randint(2**31))
        chosen = random.permutation(len(tokens))[: max(1, round(self.share * len(tokens)))]
        targets = np.full_like(tokens, KEPT)
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
    """Token that stands in a gap; by default the one behind the tokenizer's last, which the model's vocab must
    count."""

    def build(self, split: str) -> Gaps:
        """Inputs int64 [length], and targets int64 [length], -100 where no token is masked."""
        texts = self.windows(split)
        vocab = texts.tokenizer.vocab
        return Gaps(texts, self.masked, vocab if self.mask is None else self.mask, fixed=split == "test")
