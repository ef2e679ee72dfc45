"""What forward keeps for backward: Korthikanti et al., arXiv:2205.05198, for a transformer of GPT's blocks. No paddle.

Bytes of one block for one micro-batch, in 16 bits, with s tokens, b samples, h numbers a token, a heads, t tensor
ranks:

    recompute    tensor                            tensor, with sequence_parallel
    none         s·b·h·(10 + 24/t + 5·a·s/(h·t))   s·b·h/t·(34 + 5·a·s/h)           equations 2 and 4
    selective    s·b·h·(10 + 24/t)                 s·b·h/t·34                       section 5, table 2
    full         s·b·h·2                           s·b·h/t·2                        table 2

The head keeps s·b·(4·h + 4·v) bytes over t, for v words (section 4.3). Numbers of 4 bytes take twice as much, but for
the words' scores, which are of 4 bytes at all times. Attention that keeps no scores of pairs (flash) is as selective:
then the estimate for `none` is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paddle_dp.plan.pipeline_schedule import orders
from paddle_dp.units import Recompute

Keeps = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """What one micro-batch puts through a block on one rank, and how the ranks of the tensor axis share it."""

    length: int
    samples: int
    width: int
    heads: int
    vocab: int
    tensor: int = 1
    sequence_parallel: bool = False
    bytes: int = 2

    def block(self, keeps: Keeps) -> float:
        """Bytes that one block keeps of one micro-batch."""
        sbh, t = self.length * self.samples * self.width, self.tensor
        pairs = 5 * self.heads * self.length / self.width if keeps == "none" else 0.0
        if keeps == "full":
            found = 2 * sbh / (t if self.sequence_parallel else 1)
        elif self.sequence_parallel:
            found = sbh / t * (34 + pairs)
        else:
            found = sbh * (10 + 24 / t + pairs / t)
        return found * self.bytes / 2

    def head(self) -> float:
        """Bytes that the norm, the scores and the loss keep of one micro-batch."""
        each = (4 * self.width * self.bytes / 2 + 4 * self.vocab) / self.tensor
        return self.length * self.samples * each


def kept(
    tokens: Tokens, stages: Sequence[Sequence[int]], blocks: int, recompute: Recompute, waiting: float
) -> float:
    """Bytes on a rank that holds these blocks (numbers of `blocks`: an embedding, layers, a head).

    `waiting` is how many micro-batches of each of its stages wait for their backward at once, on the average.
    """
    mine = [number for stage in stages for number in stage]
    layers = [number for number in mine if 0 < number < blocks - 1]
    again = [number for number in layers if recompute.blocks and number % recompute.blocks == 0]
    plain = tokens.block("selective" if recompute.attention else "none")
    found = waiting * ((len(layers) - len(again)) * plain + len(again) * tokens.block("full"))
    found += plain if again else 0.0  # what is computed again is there once, while its backward runs
    return found + (tokens.head() if blocks - 1 in mine else 0.0)


def waiting(schedule: str, pipeline: int, pp_rank: int, micro_batches: int, each: int) -> float:
    """The most micro-batches of a stage that wait for backward at once, averaged over the rank's `each` stages."""
    if pipeline == 1:
        return 1.0
    now = most = 0
    for work in orders(schedule, pipeline, micro_batches, each)[pp_rank]:
        now += 1 if work.kind == "forward" else -1
        most = max(most, now)
    return most / each
