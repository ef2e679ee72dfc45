"""Tables of the names that a model's tensors have in published weights (docs/given-weights.md)."""

from __future__ import annotations

# Our name → theirs: "….T" is transposed, "…[0]" loses its first dim. Or (the names of q, k and v, or of one tensor of
# all three; the width of a head). The key "" has patterns of their names that are not needed.
Names = dict[str, str | tuple[tuple[str, ...], int] | tuple[str, ...]]


def encoder_names(ours: str, theirs: str, attention: str, norms: tuple[str, str], head_width: int) -> Names:
    """The names of a block's tensors in transformers' BERT and ViT, which differ in `attention` and `norms`."""
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
