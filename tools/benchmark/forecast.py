"""What plan says of one layout of a recipe: bytes a step, and the bound for a measured compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paddle_dp.plan.bound import Compute, WorkOrder, bound
from paddle_dp.plan.exchange import Between, mean_bytes, sent
from paddle_dp.plan.layout import Blocks, Layout, Sent

# The ends of names of tables that tokens or positions look up.
TABLES = ("token.weight", "embedding.weight", "embed.weight", "position")


@dataclass(frozen=True)
class Forecast:
    """`bytes`: what a rank sends in a step, the mean over the ranks; `batch`: the recipe's global batch."""

    layout: Layout
    batch: int
    bytes: float
    exchange: list[list[Sent]]  # of each rank
    order: WorkOrder
    blocks: Blocks
    between: Between | None

    @classmethod
    def of(cls, file: Path, words: list[str], ranks: int) -> Forecast:
        """Of a recipe with overrides; builds the model without memory for its weights."""
        from paddle_dp.axes.meta_init import describe_weights
        from paddle_dp.part import lazily
        from paddle_dp.recipe import read_recipe
        from paddle_dp.verbs.forecast import between, layout_of, order_of

        recipe = read_recipe(file, words)
        with lazily():
            blocks = describe_weights(recipe.model.build())
        layout, micro_batches = layout_of(recipe, ranks), recipe.train.micro_batches
        activations = between(recipe, layout)
        return cls(
            layout=layout,
            batch=recipe.train.batch,
            bytes=mean_bytes(blocks, layout, micro_batches, activations),
            exchange=[sent(blocks, layout, rank, micro_batches, activations) for rank in range(ranks)],
            order=order_of(layout, micro_batches),
            blocks=blocks,
            between=activations,
        )

    def compute(self, alone: Compute) -> Compute:
        """A rank's, from that of one process with 1/ranks of the batch: the same products, and its share of the update.

        Axes that split the model multiply a rank's samples by as much as they divide its layers.
        """
        degrees = self.layout.degrees
        split = degrees.tensor * degrees.pipeline * degrees.sharding
        return Compute(forward=alone.forward, backward=alone.backward, update=alone.update / split)

    def milliseconds(self, alone: Compute, link: float) -> tuple[float, float]:
        """The bound, and a step in which nothing is sent while the rank computes, over `link` bytes a second."""
        own = self.compute(alone)
        best, worst = (
            1e3 * max(bound(own, of_rank, link, self.order, overlap) for of_rank in self.exchange)
            for overlap in (True, False)
        )
        return best, worst


def block_shares(blocks: Blocks) -> list[float]:
    """The share of each block in the products: by its matrices. The first of several blocks has none if its matrices
    are tables that tokens look up."""
    sizes = [float(sum(weight.size for weight in block if len(weight.shape) > 1)) for block in blocks]
    if len(blocks) > 2 and any(weight.name.endswith(TABLES) for weight in blocks[0]):
        sizes[0] = 0.0
    if not any(sizes):  # no matrix
        sizes = [1.0] * len(blocks)
    return [size / sum(sizes) for size in sizes]
