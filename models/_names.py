"""The tables that say what a model's tensors are called in published weights (docs/given-weights.md)."""

from __future__ import annotations

# Our name → theirs, "….T" for a transposed tensor and "…[0]" for one without its first dim; or the names of q, k and v,
# or of one tensor of all three, and the width of a head. Under the key "": patterns of theirs that are of no use.
Names = dict[str, str | tuple[tuple[str, ...], int] | tuple[str, ...]]


def encoder_names(ours: str, theirs: str, attention: str, norms: tuple[str, str], head_width: int) -> Names:
    """A block's tensors in transformers' BERT and ViT, which call its `attention` and its `norms` otherwise."""
    names: Names = {}
    for word, turned in (("weight", ".T"), ("bias", "")):
        qkv = tuple(f"{theirs}.{attention}.{each}.{word}{turned}" for each in ("query", "key", "value"))
        names |= {
            f"{ours}.qkv.{word}": (qkv, head_width),
            f"{ours}.out.{word}": f"{theirs}.attention.output.dense.{word}{turned}",
            f"{ours}.norm1.{word}": f"{theirs}.{norms[0]}.{word}",
            f"{ours}.up.{word}": f"{theirs}.intermediate.dense.{word}{turned}",
            f"{ours}.down.{word}": f"{theirs}.output.dense.{word}{turned}",
            f"{ours}.norm2.{word}": f"{theirs}.{norms[1]}.{word}",
        }
    return names
