"""The bytes of a layout's ranks: weights, gradients, states and activations, for `paddle-dp check` and `plan` alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from paddle_dp.plan.activations import ActivationFormat, Tokens, activation_bytes, in_flight
from paddle_dp.plan.candidates import Candidate, Numerics
from paddle_dp.plan.layout import Blocks, Layout, RankMemory, distinct
from paddle_dp.plan.memory import state_bytes
from paddle_dp.plan.traced_model import TracedModel
from paddle_dp.plan.transformer import Transformer
from paddle_dp.units import Recompute

USABLE_MEMORY = 0.92  # of a device's: drivers, communicators, workspaces and gaps take the rest
# Of torchtitan's 8 measured peaks 6 were at most 1.15 times the arithmetic's (tools/planner_exam.py), the largest 1.33:
# a layout is called tight if so much would not fit.
TIGHT = 1.33


@dataclass(frozen=True, kw_only=True)
class RankBytes:
    """The bytes of one rank: `state` (weights, gradients, optimizer, ZeRO's weights under way) and `activations`, with
    the logits."""

    state: float
    activations: float

    @property
    def total(self) -> float:
        return self.state + self.activations


class FullestRank:
    """Bytes of the fullest rank of layouts of one model; layouts that share their state share its arithmetic."""

    def __init__(self, blocks: Blocks, model: Transformer | TracedModel, numerics: Numerics) -> None:
        self.blocks, self.model, self.numerics = blocks, model, numerics
        self._states = lru_cache(maxsize=None)(self._stages)
        # Of all stages together, on one rank of the tensor axis.
        numbers = range(len(blocks))
        self._elements = lru_cache(maxsize=None)(lambda tensor: sum(distinct(blocks, numbers, tensor)))

    def bytes_of(self, choice: Candidate) -> RankBytes:
        """The rank with most bytes, over all stages of the pipeline and owners of ZeRO."""
        bare = replace(choice, micro=1, micro_batches=1, recompute=Recompute())
        layout, micro = choice.layout(self.numerics), (choice.micro, choice.micro_batches)
        form, count = self.numerics.activation_format, len(self.blocks)
        ranks = (
            RankBytes(
                state=memory.total,
                activations=rank_activations(self.model, layout, memory, count, micro, form),
            )
            for memory in self._states(bare)
        )
        return max(ranks, key=lambda each: each.total)

    def least(self, choice: Candidate) -> float:
        """Bytes that no rank arrangement goes below, at once: an even share of the state."""
        degrees, widths = choice.degrees, self.numerics.widths
        elements = self._elements(degrees.tensor) / degrees.pipeline
        shards = [degrees.sharding if choice.stage >= stage else 1 for stage in (3, 2, 1)]
        each = (widths.parameter, widths.gradient, widths.optimizer)
        return elements * sum(width / shard for width, shard in zip(each, shards, strict=True))

    def _stages(self, choice: Candidate) -> list[RankMemory]:
        """The fullest owner of each stage of the pipeline."""
        layout = choice.layout(self.numerics)
        return [self._owner(layout, stage) for stage in range(choice.degrees.pipeline)]

    def _owner(self, layout: Layout, stage: int) -> RankMemory:
        degrees = layout.degrees
        first = layout.memory(self.blocks, degrees.rank({"pipeline": stage}))
        if degrees.sharding == 1:
            return first
        sizes = distinct(self.blocks, first.blocks, degrees.tensor, frozen=False)
        states = state_bytes(sizes, degrees.sharding, layout.sharding_stage, layout.widths)
        owner = max(range(len(states)), key=lambda rank: states[rank].total)
        coords = {"pipeline": stage, "sharding": owner}
        return layout.memory(self.blocks, degrees.rank(coords)) if owner else first


def rank_activations(
    model: Transformer | TracedModel,
    layout: Layout,
    memory: RankMemory,
    blocks: int,
    micro: tuple[int, int],
    form: ActivationFormat,
) -> float:
    """Bytes of a rank's activations of all micro-batches that wait, and of the logits of one. `blocks`: of the whole
    model; `micro`: the samples of a micro-batch of one rank, and the number of micro-batches."""
    degrees, (samples, micro_batches) = layout.degrees, micro
    schedule, pp_rank = layout.pipeline_schedule, memory.coords["pipeline"]
    if schedule != "f_then_b":
        micro_batches = min(micro_batches, 4 * degrees.pipeline)  # more of them wait no longer
    waiting = in_flight(schedule, degrees.pipeline, pp_rank, micro_batches, layout.virtual_stages)
    if isinstance(model, TracedModel):
        is_sync = form.sync_norms and degrees.dp_size > 1
        return model.activation_bytes(memory.stages, samples, layout.recompute, waiting, form.number, is_sync)
    tokens = Tokens(
        length=model.length // degrees.sequence, samples=samples, width=model.width, heads=model.heads,
        vocab=round(model.vocab), tensor=degrees.tensor, sequence_parallel=layout.sequence_parallel,
        bytes=form.number, kv_fraction=model.kv_heads / model.heads, hidden=model.hidden, matrices=model.matrices,
        attended=model.length, masked=form.masked, head_width=model.head_width,
    )  # fmt: skip
    return activation_bytes(tokens, memory.stages, blocks, layout.recompute, waiting, form.flash)
