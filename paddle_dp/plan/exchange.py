"""Bytes that a rank sends in one step, per axis, by arithmetic, and the work that can hide the transfer.

For Ψ bytes of parameters on a rank, A bytes of activations between two blocks of all its samples, n ranks of the axis:

    data             gradients               2(n−1)/n·Ψ            a ring's all-reduce (Patarasuk and Yuan 2009); with
                                                                   compression Ψ in 16 bits, or the factors' bytes
    data, sharding,  gradients               half of these         with reduce_dtype bfloat16; parameters as they are
      sequence
    data, where      parameters              2(n−1)/n·Ψ / H        once in H steps; with the optimizer states on
      ranks average                                                request; warm-up steps are not counted
    sharding 1, 2    gradients, parameters   (n−1)/n·Ψ each        ZeRO (arXiv:1910.02054, section 7)
    sharding 2       gradients              for each micro-batch; on CPUs also half of those of data and sequence
    sharding 3       gradients, parameters   (n−1)/n·Ψ, parameters at most twice: held ones are not fetched again
    tensor           activations             2(n−1)/n·A, 4 times a block, 1 each for embedding and head
    tensor, with     activations             the same: each all-reduce is a reduce-scatter and an all-gather
      sequence_parallel                      (both: Korthikanti et al., arXiv:2205.05198, section 4.2.2)
    sequence         activations             (n−1)/n²·A, 8 times a block (Jacobs et al., arXiv:2309.14509, section 3.2);
                                             of 1/t of the heads with t tensor ranks
                     gradients               2(n−1)/n·Ψ
    pipeline         activations             A for each boundary between stages, and each direction

Ranks of the sharding axis send unequal amounts because parameters are not split; the table has their mean. It leaves
out the exchanges for metrics, the gradient norm and a split loss: a few numbers per sample or token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from paddle_dp.mesh.degrees import REPLICA_AXES
from paddle_dp.plan.activations import recomputed_blocks
from paddle_dp.plan.layout import (
    Blocks,
    Layout,
    Payload,
    RankMemory,
    Sent,
    Weight,
    When,
    distinct,
    distinct_weights,
    layer_loads,
    layers,
    owned,
)
from paddle_dp.plan.memory import owned_sizes
from paddle_dp.plan.pipeline_schedule import Kind
from paddle_dp.plan.sharded import travels


@dataclass(frozen=True, kw_only=True)
class Between:
    """The activations between two transformer blocks, for all samples of a dp_rank in one step, with whole sequences.

    `numbers` = samples · tokens · width, of `bytes` each. `attention`: the widths that enter and leave attention (q, k,
    v and its output: 4; fewer if several query heads share a key and value head).
    """

    numbers: int
    bytes: int = 4
    attention: float = 4.0

    @property
    def size(self) -> float:
        return float(self.numbers * self.bytes)


def sent(
    blocks: Blocks, layout: Layout, rank: int, micro_batches: int, between: Between | None
) -> list[Sent]:
    """All transfers of `rank` in one step. With `between` None activations are unknown and left out."""
    memory = layout.memory(blocks, rank)
    if (counted := layout.transfers(blocks, memory)) is not None:
        return counted
    weights = distinct_weights(blocks, memory.blocks)
    transfers = [*axes_gradients(blocks, layout, memory, weights, micro_batches)]
    if between is not None:
        transfers += _activations(layout, memory, len(blocks), between)
        transfers += _between_stages(layout, memory, between)
    tied = _shared_by_stages(blocks, layout, memory)
    transfers += [Sent(axis="pipeline", payload="gradients", bytes=tied, when="last backward", hides=False)]
    return [each for each in transfers if each.bytes or each.received_bytes]


def mean_bytes(blocks: Blocks, layout: Layout, micro_batches: int, between: Between | None) -> float:
    """The bytes that a rank sends in one step, the mean over ranks."""
    ranks = layout.degrees.ranks
    every = (s.bytes for rank in range(ranks) for s in sent(blocks, layout, rank, micro_batches, between))
    return sum(every) / ranks


def axes_gradients(
    blocks: Blocks, layout: Layout, memory: RankMemory, weights: Sequence[Weight], micro_batches: int
) -> Iterator[Sent]:
    """Gradients and ZeRO's parameters, along axes with other samples or tokens on each rank."""
    degrees, ranks, stage = layout.degrees, layout.degrees.sharding, layout.sharding_stage
    owner_of = owned(weights, layout)

    def shares(selection: Sequence[Weight]) -> tuple[int, int]:
        """The elements that this rank owns, and that others own."""
        sizes = owned_sizes(
            [w.local_size(degrees.tensor) for w in selection if w.name in owner_of],
            [owner_of[w.name] for w in selection if w.name in owner_of], ranks,
        )  # fmt: skip
        local = sizes[memory.coords["sharding"]]
        return local, sum(sizes) - local

    trained = [weight for weight in weights if not weight.frozen]
    local_trained, _ = shares(trained)

    def moved(
        payload: Payload, when: When, times: int, owners_send: bool, selection: Sequence[Weight]
    ) -> Sent:
        local, remote = shares(selection)
        to_others = (ranks - 1) * local
        each = layout.gradient_on_its_way if payload == "gradients" else layout.widths.parameter
        out, into = (to_others, remote) if owners_send else (remote, to_others)
        out, into = times * each * out, times * each * into
        return Sent(axis="sharding", payload=payload, bytes=out, received=into, when=when)

    if ranks > 1 and stage == 1:
        yield moved("gradients", "last backward", 1, False, trained)
    elif ranks > 1:
        yield moved("gradients", "every backward", micro_batches, False, trained)
    if ranks > 1 and stage == 3:
        fetched = _fetched(blocks, layout, memory, micro_batches, owner_of)
        yield moved("parameters", "every forward", 1, True, fetched["forward"])
        yield moved("parameters", "every backward", 1, True, fetched["backward"])
    elif ranks > 1:
        yield moved("parameters", "first forward", 1, True, trained)
    for axis in REPLICA_AXES:  # one exchange covers both; each axis lists its share
        if degrees[axis] > 1:
            together = prod(degrees[axis] for axis in REPLICA_AXES)
            share = (degrees[axis] - 1) / sum(degrees[a] - 1 for a in REPLICA_AXES)
            # On CPUs gradients go straight to the owner's replicas, a part to each: stage 2's in every backward.
            straight = ranks > 1 and stage == 2 and not layout.accelerator
            halves = 1 + (micro_batches if straight else 1)
            count = share * halves * (together - 1) / together * local_trained
            size = count * layout.gradient_on_its_way * layout.gradient_share(trained)
            yield Sent(axis=axis, payload="gradients", bytes=size, when="last backward")


def _fetched(
    blocks: Blocks, layout: Layout, memory: RankMemory, micro_batches: int, owner_of: Mapping[str, int]
) -> dict[Kind, list[Weight]]:
    """The weights that stage 3 fetches in a step, each as often as it is fetched, for forwards and for backwards.

    Weights that are still held since their last use are not fetched again. In a pipeline the order differs by stage, so
    every use counts: an upper bound.
    """
    numbered_layers = [(number, layer) for number in memory.blocks for layer in layers(blocks[number])]
    learning = (at for at, (_, layer) in enumerate(numbered_layers) if not all(w.frozen for w in layer))
    first = next(learning, len(numbered_layers))
    forward: list[tuple[Kind, int]] = [("forward", at) for at in range(len(numbered_layers))]
    backward: list[tuple[Kind, int]] = []  # ends at the first layer that learns
    run_twice = recomputed_blocks(len(blocks), layout.recompute)
    for number in reversed(memory.blocks):
        block_layers = [at for at, (n, _) in enumerate(numbered_layers) if n == number and at >= first]
        recomputed = block_layers if number in run_twice else []
        backward += [("backward", at) for at in (*recomputed, *reversed(block_layers))]
    single_pass = [*forward, *backward]
    if layout.degrees.pipeline > 1:
        passes, goes = [single_pass], [True] * len(single_pass)
    else:  # every later micro-batch fetches as the second does
        passes = [single_pass] * min(micro_batches, 2)
        loads = layer_loads([layer for _, layer in numbered_layers], owner_of, layout)
        order = tuple(at for each in passes for _, at in each)
        goes = travels(order, tuple(map(tuple, loads)), layout.prefetch)
    fetched: dict[Kind, list[Weight]] = {"forward": [], "backward": []}
    for number, each in enumerate(passes):
        times = micro_batches - number if number == len(passes) - 1 else 1
        for (kind, at), go in zip(each, goes[number * len(single_pass) :], strict=False):
            fetched[kind] += numbered_layers[at][1] * (times if go else 0)
    return fetched


def _activations(layout: Layout, memory: RankMemory, blocks: int, between: Between) -> Iterator[Sent]:
    """Exchanges within blocks, for which the rank waits."""
    tensor, sequence = layout.degrees.tensor, layout.degrees.sequence
    layers = [number for number in memory.blocks if 0 < number < blocks - 1]
    recomputed = len({*memory.blocks} & {*recomputed_blocks(blocks, layout.recompute)})
    first, last = 0 in memory.blocks, blocks - 1 in memory.blocks
    if tensor > 1:
        size = 2 * (tensor - 1) / tensor * between.size / sequence
        yield _inside("tensor", size * (2 * len(layers) + first), "every forward")
        yield _inside("tensor", size * (2 * (len(layers) + recomputed) + last), "every backward")
    if sequence > 1:
        size = (sequence - 1) / sequence**2 * between.size * between.attention / tensor  # its heads
        yield _inside("sequence", size * len(layers), "every forward")
        yield _inside("sequence", size * (len(layers) + recomputed), "every backward")


def _inside(axis: str, size: float, when: When) -> Sent:
    return Sent(axis=axis, payload="activations", bytes=size, when=when, hides=False)


def _between_stages(layout: Layout, memory: RankMemory, between: Between) -> Iterator[Sent]:
    """Outputs to the next stage, and input gradients to the previous one."""
    degrees = layout.degrees
    stages, here = degrees.pipeline * layout.virtual_stages, len(memory.stages)
    if stages > 1 and degrees.pipeline > 1:
        first, last = memory.coords["pipeline"] == 0, memory.coords["pipeline"] == degrees.pipeline - 1
        size = between.size / degrees.sequence / (degrees.tensor if layout.sequence_parallel else 1)
        times = 2 * here - first - last
        sums = size * times
        yield Sent(axis="pipeline", payload="activations", bytes=sums, when="between stages", transfers=times)


def _shared_by_stages(blocks: Blocks, layout: Layout, memory: RankMemory) -> float:
    """Bytes of the all-reduce of weights that two stages share."""
    if layout.degrees.pipeline == 1:
        return 0.0
    tensor, local_names = layout.degrees.tensor, {w.name for number in memory.blocks for w in blocks[number]}
    remote_blocks = [number for number in range(len(blocks)) if number not in memory.blocks]
    shared = [[w for w in blocks[number] if w.name in local_names] for number in remote_blocks]
    sizes = distinct(shared, range(len(shared)), tensor, frozen=False)
    return float(sum(sizes)) * layout.widths.gradient  # 2(k−1)/k of two stages
