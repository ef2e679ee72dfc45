"""The work and the messages of a step, as numbers: a transformer's sizes, its layout, and the device, in columns.

Every quantity is an array with one element for each layout, so that a thousand of them are foretold at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from paddle_dp.plan.devices import Device

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Layouts of training steps, [n] each.

    Model: `depth` blocks of `width`, `heads` query heads, `kv_heads` of keys and values, `head_width` each, an MLP of
    `hidden` inside with `matrices` products (2; 3 if it is gated), a head over `vocab` words, `length` tokens a sample;
    `tables` of the vocabulary on the rank with most of them, embedding and head.
    Layout: the degrees `tensor`, `pipeline`, `data` (all ranks with other samples), `sequence`; `sharded`: the ranks
    among which ZeRO shards, `stage` 0 to 3; `virtual_stages` of a rank; `full_depth` and `last_depth`: blocks on the
    fullest rank of the pipeline and on its last one (by default `depth` / `pipeline`). `micro` samples in one of
    `micros` micro-batches of a rank. `sequence_parallel`, `ulysses` (heads are exchanged; else keys and values are
    gathered), `flash` (scores stay out of memory), `masked` (flash attention skips no tile: of packed documents, or in
    both directions), `fp8`, `overlaps_data`, `overlaps_stages` (the software computes meanwhile), `data_outside` (the
    data axis lies outside of pipelines, sharding within): 0 or 1. `recomputed_blocks`: the share of blocks that are
    recomputed; `recomputed_scores`: attention is (0 or 1); `recomputed_products`: the share of all products that is.
    Bytes: of one `number` of activations, of a `gradient` and a `parameter` on their way; `cast`, moved by a pass over
    a weight in addition to its products (float32 weights are read and rounded). `update_products`: FLOPs of an update
    of one block, as many as `peak` would do in the time.
    Device: `peak` FLOP/s, `memory_rate`, `card_link` and `node_link` bytes/s, `node` cards.
    """

    depth: Numbers
    width: Numbers
    heads: Numbers
    kv_heads: Numbers
    head_width: Numbers
    hidden: Numbers
    matrices: Numbers
    vocab: Numbers
    length: Numbers
    tables: Numbers
    tensor: Numbers
    pipeline: Numbers
    data: Numbers
    sequence: Numbers
    sharded: Numbers
    stage: Numbers
    virtual_stages: Numbers
    full_depth: Numbers
    last_depth: Numbers
    micro: Numbers
    micros: Numbers
    sequence_parallel: Numbers
    ulysses: Numbers
    flash: Numbers
    masked: Numbers
    fp8: Numbers
    overlaps_data: Numbers
    overlaps_stages: Numbers
    data_outside: Numbers
    recomputed_blocks: Numbers
    recomputed_scores: Numbers
    recomputed_products: Numbers
    number: Numbers
    gradient: Numbers
    parameter: Numbers
    cast: Numbers
    update_products: Numbers
    peak: Numbers
    memory_rate: Numbers
    card_link: Numbers
    node_link: Numbers
    node: Numbers

    @classmethod
    def stack(cls, rows: Sequence[Mapping[str, float]]) -> Workload:
        """Rows of settings by name → columns; settings left out have the defaults of `complete`. Raises KeyError for a
        setting that has none."""
        completed = [complete(row) for row in rows]
        return cls(**{f.name: np.array([row[f.name] for row in completed], float) for f in fields(cls)})

    def take(self, index: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Workload:
        """The layouts at these indices, or where the mask is true."""
        return Workload(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def __len__(self) -> int:
        return len(self.depth)

    @property
    def ranks(self) -> Numbers:
        """The number of cards of each layout."""
        return self.tensor * self.pipeline * self.data * self.sequence

    @property
    def flops(self) -> Numbers:
        """FLOPs of a step's products on all ranks, nothing recomputed: 6 a weight and token, and 12·length·queries
        a token and block for attention, whole squares of scores (Narayanan et al., arXiv:2104.04473, appendix)."""
        dense = self.depth * self.block_weights + self.vocab * self.width
        scores = 12 * self.depth * self.length * self.queries
        return (6 * dense + scores) * self.micro * self.micros * self.data * self.length

    @property
    def queries(self) -> Numbers:
        """Numbers of a token's q, and of attention's output."""
        return self.heads * self.head_width

    @property
    def keys(self) -> Numbers:
        """Numbers of a token's k, and of its v."""
        return self.kv_heads * self.head_width

    @property
    def block_weights(self) -> Numbers:
        """Weights in the products of one block of the whole model."""
        return self.width * (2 * self.queries + 2 * self.keys) + self.matrices * self.width * self.hidden


_NEUTRAL = {
    "matrices": 2, "tables": 1, "tensor": 1, "pipeline": 1, "data": 1, "sequence": 1, "stage": 0, "virtual_stages": 1,
    "sequence_parallel": 0, "ulysses": 0, "flash": 0, "masked": 0, "fp8": 0, "overlaps_data": 0, "overlaps_stages": 0,
    "data_outside": 0, "recomputed_blocks": 0, "recomputed_scores": 0, "recomputed_products": 0,
    "number": 2, "gradient": 2, "parameter": 2, "cast": 0, "update_products": 0,
}  # fmt: skip


def complete(row: Mapping[str, float]) -> dict[str, float]:
    """The row with each missing setting: neutral, or derived from others, as GPT-2 and Megatron do."""
    full = {**_NEUTRAL, **row}
    full["kv_heads"] = full.get("kv_heads") or full["heads"]
    full["head_width"] = full.get("head_width") or full["width"] / full["heads"]
    full["hidden"] = full.get("hidden") or 4 * full["width"]
    full.setdefault("sharded", full["data"] * full["sequence"] if full["stage"] else 1)
    full.setdefault("full_depth", full["depth"] / full["pipeline"])
    full.setdefault("last_depth", full["full_depth"])
    return full


def device_columns(device: Device, low: bool = True) -> dict[str, float]:
    """The device's settings in a row. `low`: products are of 16-bit numbers."""
    return {
        "peak": device.peak16 if low else device.peak32,
        "memory_rate": device.memory_rate, "card_link": device.card_link,
        "node_link": device.node_link, "node": device.node,
    }  # fmt: skip
