"""A transformer's sizes, from a model's settings and the shapes of its weights: its products follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paddle_dp.plan.layout import Blocks, Weight

NEAR = 0.01  # a block's matrices may differ from the formula by so much: biases are no matrices, small gates may be


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """Sizes of a model of equal blocks between an embedding and a head.

    `depth` blocks of `width`, with `heads` of q and `kv_heads` of k and v, `head_width` each; an MLP of `hidden` with
    `matrices` products (3: gated); `vocab` words in the head, for each of `length` tokens; `tables`: embedding and head
    of their own (2) or one for both (1). `causal`: a token attends to earlier ones alone, as decoders do.
    """

    depth: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    matrices: int
    vocab: float
    length: int
    tables: int
    causal: bool = True

    def columns(self) -> dict[str, float]:
        """The sizes as columns of a workload, but for `tables`, which depend on the pipeline."""
        sizes = ("depth", "width", "heads", "kv_heads", "head_width", "hidden", "matrices", "vocab", "length")
        return {name: float(getattr(self, name)) for name in sizes}


def transformer(config: Any, length: int, blocks: Blocks) -> Transformer | str:
    """The sizes of a model with this Config and these weights, for samples of `length` tokens (0: of the Config); or
    the reason why its products cannot be counted, as the end of a sentence.

    The Config has `width`, `depth` and `heads`, and `vocab` and `length`, or an image's `image`, `patch` and `classes`;
    `causal = False` if attention goes both ways. The matrices of each block must belong to attention and an MLP, so
    that another architecture is not taken for one.
    """
    names = ("width", "depth", "heads", "image", "patch")
    width, depth, heads, image, patch = (_integer(config, name) for name in names)
    if not (width and depth and heads):
        return "its settings have no width, depth and heads: products are counted for transformers only"
    length, vocab = length or _integer(config, "length"), float(_integer(config, "vocab"))
    if image and patch:
        length = (image // patch) ** 2
        vocab = _integer(config, "classes") / length  # one score a sample, not one a token
    if not (length and vocab):
        return "its settings have no length and vocab, and no image, patch and classes"
    if len(blocks) != depth + 2:
        return f"it has {len(blocks)} ordered blocks, and {depth} between an embedding and a head make {depth + 2}"
    kv_heads = _integer(config, "kv_heads") or heads
    hidden = _integer(config, "hidden") or 4 * width
    head_width = _integer(config, "head_width") or width // heads
    attention = width * head_width * (2 * heads + 2 * kv_heads)
    stored = matrix_elements(blocks[1])
    other = next((n for n, block in enumerate(blocks[1:-1], 1) if matrix_elements(block) != stored), None)
    if other is not None:
        return (
            f"its blocks differ: the matrices of block 1 have {stored:,} elements, and those of block {other} "
            f"{matrix_elements(blocks[other]):,}"
        )
    matrices = round((stored - attention) / (width * hidden))
    expected = attention + matrices * width * hidden
    if matrices not in (2, 3) or abs(stored - expected) > NEAR * expected:
        return (
            f"a block's matrices have {stored:,} elements, and attention with an MLP of {hidden} would have "
            f"{attention + 2 * width * hidden:,}, or gated {attention + 3 * width * hidden:,}"
        )
    return Transformer(
        depth=depth, width=width, heads=heads, kv_heads=kv_heads, head_width=head_width, hidden=hidden,
        matrices=matrices, vocab=vocab, length=length, tables=1 if getattr(config, "tied", False) else 2,
        causal=bool(getattr(config, "causal", True)),
    )  # fmt: skip


def _integer(config: Any, name: str) -> int:
    size = getattr(config, name, 0)
    return size if isinstance(size, int) else 0


def matrix_elements(weights: Sequence[Weight]) -> int:
    """The elements of a block's matrices: weights with two dims, or more, as experts' have together."""
    return sum(weight.size for weight in weights if len(weight.shape) >= 2)
