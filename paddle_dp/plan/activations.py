"""Bytes of activations that forward keeps for backward, for a transformer of GPT blocks (arXiv:2205.05198).

After Korthikanti et al.: bytes of one block for one micro-batch, in 16 bits, with s tokens, b samples, width h, a heads
and t tensor ranks:

    recompute    tensor                            tensor, with sequence_parallel
    none         s·b·h·(10 + 24/t + 5·a·s/(h·t))   s·b·h/t·(34 + 5·a·s/h)           equations 2 and 4
    selective    s·b·h·(10 + 24/t)                 s·b·h/t·34                       section 5, table 2
    full         s·b·h·2                           s·b·h/t·2                        table 2

On each of p ranks of a sequence axis (Ulysses) s is s/p, but in 5·a·s/h: a/p heads see all tokens, s·s·a/p scores.
The head keeps s·b·(4·h + 4·v) / t bytes, for a vocabulary of v (section 4.3), and 8·v more while the loss is computed.
In 32 bits everything takes twice as much, except the logits, which always have 4 bytes. Flash attention keeps no
scores, like `selective`; a mask of packed documents it keeps in each block: 2·b·s² bytes, on each tensor rank, and
sequence rank, of all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from paddle_dp.plan.pipeline_schedule import orders
from paddle_dp.units import Recompute

# Bytes of a logit while its loss is computed: in float32 the logit, its softmax and its gradient. `Tokens.head` counts
# the 4 that forward keeps.
LOGIT_PEAK = 12

Keeps = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class ActivationFormat:
    """The form in which activations are kept: bytes of a `number`; `flash`: attention keeps no scores; `masked`: its
    tokens see their document alone; `sync_norms`: BatchNorms take the statistics of all ranks."""

    number: int
    flash: bool
    masked: bool
    sync_norms: bool = False


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The sizes of one micro-batch in a block on one rank, and how the tensor axis splits it; `bytes` per number.

    `attended`: the tokens of a whole sample, of which a rank of a sequence axis has `length` (0: it has all of them).
    `masked`: attention has a mask of documents. `kv_fraction`: heads of keys and values for each of q, of
    `head_width` (0: width / heads). An MLP of `hidden` (0: 4·width) numbers has `matrices` products, 3 if it is gated.
    """

    length: int
    samples: int
    width: int
    heads: int
    vocab: int
    tensor: int = 1
    sequence_parallel: bool = False
    bytes: int = 2
    kv_fraction: float = 1.0
    head_width: int = 0
    hidden: int = 0
    matrices: int = 2
    attended: int = 0
    masked: bool = False

    def block(self, keeps: Keeps) -> float:
        """Bytes that one block keeps of one micro-batch."""
        sbh, t = self.length * self.samples * self.width, self.tensor
        attended = self.attended or self.length
        scores = 5 * self.heads * attended / self.width if keeps == "none" else 0.0
        if keeps == "full":
            size = 2 * sbh / (t if self.sequence_parallel else 1)
        elif self.sequence_parallel:
            size = sbh / t * (10 + self.cut_numbers + scores)
        else:
            size = sbh * (10 + self.cut_numbers / t + scores / t)
        if keeps == "selective" and self.masked:
            size += 2 * self.samples * attended**2
        return size * self.bytes / 2

    @property
    def cut_numbers(self) -> float:
        """Bytes that the tensor axis splits, for each number of the width: q, the output, keys and values in 16 bits,
        twice; in the MLP each product's output, and the activation's (GPT: 24)."""
        hidden, queries = self.hidden or 4 * self.width, self.heads * self.head_width or self.width
        return (queries * (4 + 4 * self.kv_fraction) + 2 * self.matrices * hidden) / self.width

    def head(self) -> float:
        """Bytes that the final norm, the logits and the loss keep of one micro-batch."""
        each = (4 * self.width * self.bytes / 2 + 4 * self.vocab) / self.tensor
        return self.length * self.samples * each


def activation_bytes(
    tokens: Tokens,
    stages: Sequence[Sequence[int]],
    blocks: int,
    recompute: Recompute,
    in_flight: float,
    flash: bool = False,
) -> float:
    """Bytes on a rank with the blocks in `stages` (numbers of `blocks`: an embedding, layers, a head), at the peak.

    `in_flight`: the micro-batches per stage that await backward at once, from the function `in_flight`. `flash`:
    attention keeps no scores.
    """
    local_blocks = [number for stage in stages for number in stage]
    layers = [number for number in local_blocks if 0 < number < blocks - 1]
    recomputed = {*layers} & {*recomputed_blocks(blocks, recompute)}
    plain = tokens.block("selective" if recompute.attention or flash else "none")
    size = in_flight * ((len(layers) - len(recomputed)) * plain + len(recomputed) * tokens.block("full"))
    size += plain if recomputed else 0.0  # the block that is in backward now
    logits = (LOGIT_PEAK - 4) * tokens.length * tokens.samples * tokens.vocab / tokens.tensor
    return size + (tokens.head() + logits if blocks - 1 in local_blocks else 0.0)


def recomputed_blocks(blocks: int, recompute: Recompute) -> range:
    """The numbers of the blocks that backward computes again, of so many, as `model.recompute` does: never the last,
    nor the first, whose inputs are samples and need no gradient."""
    every = recompute.blocks
    return range(max(every - 1, 1), blocks - 1, every) if every else range(0)


def in_flight(schedule: str, pipeline: int, pp_rank: int, micro_batches: int, virtual_stages: int) -> float:
    """The most micro-batches that await backward at once on a rank, divided by the number of its stages."""
    if pipeline == 1:
        return 1.0
    order = orders(schedule, pipeline, micro_batches, virtual_stages)[pp_rank]
    waiting = accumulate(1 if work.kind == "forward" else -1 for work in order)
    return max(waiting) / virtual_stages
