"""The small model that is trained on the device."""

from __future__ import annotations

from pathlib import Path

from tests.house.recipes import small_recipe

GPT = small_recipe(
    "length: 20 steps, batch: 8, micro_batches: 2, seed: 3", optimizer="adamw, clip: 0.5", strategy="hybrid",
    model="gpt, vocab: 32, width: 32, depth: 4, heads: 4, length: 16, dropout: 0.1", callbacks="[]",
    dataset="random_tokens, vocab: 32, length: 16, samples: 30, test_samples: 10",
    schedule="constant, learning_rate: 3.0e-3",
)  # fmt: skip


def gpt(folder: Path) -> Path:
    """30 samples in batches of 8: the last of an epoch is short. With dropout, which is the same in every layout."""
    path = folder / "gpt.yaml"
    path.write_text(GPT)
    return path
