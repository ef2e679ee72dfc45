"""The type of the tables that say what a model's tensors are called in published weights (docs/given-weights.md)."""

from __future__ import annotations

# Our name → theirs, "….T" for a transposed tensor and "…[0]" for one without its first dim; or the names of q, k and v,
# or of one tensor of all three, and the width of a head. Under the key "": patterns of theirs that are of no use.
Names = dict[str, str | tuple[tuple[str, ...], int] | tuple[str, ...]]
