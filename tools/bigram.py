"""The loss of a bigram model on a recipe's data, as the baseline of a language model.

    python tools/bigram.py configs/gpt_single.yaml [KEY=VALUE …]

Counts which token follows which in the train split, adds one to every count, and prints the mean negative logarithm
of its predictions on the test split: nats per token, as cross_entropy does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parent.parent))

from paddle_dp.recipe import read_recipe

Tokens = NDArray[Any]


def bigram_loss(train: Tokens, test: Tokens, vocab: int) -> float:
    """Nats per token of `test` under p(b | a) = (count(ab) + 1) / (count(a) + vocab), counted in `train`."""
    pairs, counts = np.unique(_pairs(train, vocab), return_counts=True)
    firsts = np.bincount(train[:-1], minlength=vocab)
    tested = _pairs(test, vocab)
    where = np.searchsorted(pairs, tested).clip(max=len(pairs) - 1)
    known = np.where(pairs[where] == tested, counts[where], 0)
    return float(np.mean(np.log(firsts[tested // vocab] + vocab) - np.log(known + 1)))


def unigram_loss(train: Tokens, test: Tokens, vocab: int) -> float:
    """Nats per token of `test` under p(b) = (count(b) + 1) / (tokens + vocab), counted in `train`."""
    counts = np.bincount(train[1:], minlength=vocab) + 1
    return float(np.mean(np.log(counts.sum()) - np.log(counts[test[1:]])))


def _pairs(tokens: Tokens, vocab: int) -> NDArray[np.int64]:
    wide = tokens.astype(np.int64)
    return wide[:-1] * vocab + wide[1:]


def main(path: str, overrides: list[str]) -> None:
    """Prints the losses, and the number of tokens and files."""
    config = read_recipe(Path(path), overrides).dataset
    splits = [config.build(split) for split in ("train", "test")]
    # As far as samples cover them.
    train, test = (data.tokens[: len(data) * data.length + 1] for data in splits)
    vocab = splits[0].tokenizer.vocab
    sizes = [
        f"{len(tokens) - 1:,} tokens of {len(data.files)} files"
        for tokens, data in zip((train, test), splits, strict=True)
    ]
    print(f"train {sizes[0]}, held out {sizes[1]}")
    print(f"unigram {unigram_loss(train, test, vocab):.4f} nats per token")
    print(f"bigram  {bigram_loss(train, test, vocab):.4f} nats per token")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(f"usage: {Path(sys.argv[0]).name} RECIPE [KEY=VALUE …]")
    main(sys.argv[1], sys.argv[2:])
