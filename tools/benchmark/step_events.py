"""Foretells a step by playing it: ranks that compute, and links that carry message after message.

Each rank runs its program: the work of its blocks in the order of its schedule, the exchanges within them, for which it
waits, and those of gradients and parameters, which travel meanwhile. Seconds of compute and the speed of links are
given; the bytes are those of `plan.exchange`, and nothing is fitted. `plan.bound` is what no order can beat; this is
the order of this package (docs/decisions/0020). Left out: exchanges of a few numbers (metrics, norms, a split loss).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any

from paddle_dp.exchange.bucketed_gradients import MOST_WAITING, WAITING
from paddle_dp.exchange.buckets import LARGEST, MIN_BUCKETS, SMALLEST
from paddle_dp.mesh.degrees import REPLICA_AXES
from paddle_dp.plan.activations import recomputed_blocks
from paddle_dp.plan.bound import Compute
from paddle_dp.plan.exchange import Between
from paddle_dp.plan.layout import Blocks, Layout, Weight, distinct_weights, owned
from paddle_dp.plan.pipeline_schedule import Work, orders
from tools.benchmark.fetched_weights import Use, uses
from tools.benchmark.forecast import block_shares
from tools.benchmark.link_events import Key, Kind, Link, Op, Play, Transfer

STEPS = 4  # one after another, of which the last counts


def step_seconds(
    blocks: Blocks,
    layout: Layout,
    micro_batches: int,
    between: Between | None,
    compute: Compute,
    link: Link,
) -> float:
    """Seconds of a step that follows another, in a layout of axes whose ranks exchange in each step.

    `compute`: of a rank with an equal share of the model and of the samples.
    """
    script = _Script(blocks, layout, micro_batches, between, compute, link)
    marks = Play(script.programs, script.transfers, link).marks()
    ends = [max(times[step] for times in marks) for step in range(STEPS)]
    return ends[-1] - ends[-2]


@dataclass
class _Bucket:
    """The bytes of an owner's gradients that have not left, and the number of buckets that have."""

    size: float = 0.0
    count: int = 0


@dataclass
class _Script:
    """The programs of a layout's ranks for some steps, and their transfers."""

    blocks: Blocks
    layout: Layout
    micro_batches: int
    between: Between | None
    compute: Compute
    link: Link

    def __post_init__(self) -> None:
        self.shares, self.degrees = block_shares(self.blocks), self.layout.degrees
        self.stage = self.layout.sharding_stage if self.degrees.sharding > 1 else 0
        self.transfers: dict[Key, Transfer] = {}
        self.ranks = range(self.degrees.ranks)
        memories = [self.layout.memory(self.blocks, rank) for rank in self.ranks]
        self.coords = [memory.coords for memory in memories]
        self.programs = [_RankScript(self, rank, memories[rank].stages).program for rank in self.ranks]

    def group(self, rank: int, axes: Sequence[str]) -> list[int]:
        """The ranks that differ from `rank` in these axes alone, in their order."""
        mine = self.coords[rank]
        return [
            other
            for other in self.ranks
            if all(self.coords[other][axis] == mine[axis] for axis in mine if axis not in axes)
        ]

    def add(self, key: Key, flows: Mapping[int, tuple[float, float]], stream: Key, kind: Kind) -> Key:
        """Records a transfer among all ranks of `flows`, once."""
        self.transfers.setdefault(key, Transfer(frozenset(flows), flows, stream, kind))
        return key


class _RankScript:
    """One rank's program."""

    def __init__(self, script: _Script, rank: int, stages: tuple[tuple[int, ...], ...]) -> None:
        self.script, self.rank, self.stages = script, rank, stages
        self.layout, self.degrees, self.stage = script.layout, script.degrees, script.stage
        self.shards = script.group(rank, ("sharding",))
        self.replicas = script.group(rank, REPLICA_AXES)
        self.shard = script.coords[rank]["sharding"]
        self.straight = self.stage in (1, 2) and len(self.replicas) > 1 and not self.layout.accelerator
        own_blocks = [number for stage in stages for number in stage]
        self.weights = {
            n: [w for w in distinct_weights(script.blocks, [n]) if not w.frozen] for n in own_blocks
        }
        self.owners = owned(distinct_weights(script.blocks, own_blocks), self.layout) if self.stage else {}
        total = sum(self._bytes(weight) for weights in self.weights.values() for weight in weights)
        self.bucket_size = self._bucket_size(total)
        self.most_in_flight = min(total / WAITING, MOST_WAITING * self.degrees.sharding)
        self.order = self._order()
        self.uses: list[list[Use]] = []  # of stage 3: for each pass, of each of its blocks
        if self.stage == 3:
            passes = [(work.kind, self._numbers(work)) for work in self.order]
            self.uses = uses(script.blocks, passes, self.layout, self.owners)
        self._fetched_in: defaultdict[int, list[Weight]] = defaultdict(list)  # by chunk
        for use in (use for of_block in self.uses for use in of_block):
            self._fetched_in[use.chunk] += use.fetched
        self.program: list[Op] = []
        self._buckets: dict[int, _Bucket] = {}
        self._sent: list[Key] = []  # exchanges of gradients of this step
        self._in_flight: deque[tuple[Key, float]] = deque()  # buckets and their bytes, the oldest first
        self._shard_size = 0.0  # bytes of the shard's gradients that replicas add up after backward
        for step in range(STEPS):
            self._step(step, own_blocks)

    def _step(self, step: int, own_blocks: Sequence[int]) -> None:
        self._begin_pass(step)
        self._next_uses, self._requested = iter(self.uses), 0  # the number of chunks that were asked for
        self._fetched: dict[tuple[int, str], Key] = {}  # by chunk and weight: the transfer that has it
        # Of stage 3: the gradients that have not left, and those that travel.
        self._gradient_chunk, self._reducing = list[Weight](), list[Key]()
        for work in self.order:
            self._work(step, work)
        self._end_gradients(step)
        self.program.append(("work", self.script.compute.update))
        if self.stage in (1, 2):
            self._share_parameters(step, own_blocks)
        self.program.append(("mark", step))

    def _order(self) -> Sequence[Work]:
        layout, micro_batches = self.layout, self.script.micro_batches
        if self.degrees.pipeline > 1:
            schedule = orders(
                layout.pipeline_schedule, self.degrees.pipeline, micro_batches, layout.virtual_stages
            )
            return schedule[self.script.coords[self.rank]["pipeline"]]
        return [
            work
            for number in range(micro_batches)
            for work in (Work("forward", number), Work("backward", number))
        ]

    def _work(self, step: int, work: Work) -> None:
        """A micro-batch's forward or backward through one of the rank's stages."""
        script, forward = self.script, work.kind == "forward"
        name = (step, work.kind, work.micro_batch)
        virtual_stage = work.chunk * self.degrees.pipeline + script.coords[self.rank]["pipeline"]
        onward = 1 if forward else -1
        if (received := self._handover(name, virtual_stage - onward, virtual_stage)) is not None:
            self.program.append(("wait", received))
        compute = script.compute.forward if forward else script.compute.backward
        equal = self.degrees.pipeline / script.micro_batches
        is_last = work.micro_batch == script.micro_batches - 1
        again = recomputed_blocks(len(script.blocks), self.layout.recompute)
        for number in self._numbers(work):
            self._need_new(step, name, number)
            seconds = compute * script.shares[number] * equal
            if not forward and number in again:
                seconds += script.compute.forward * script.shares[number] * equal
            self._block(name, number, seconds)
            if not forward and self.stage < 3 and (is_last or self.stage == 2):
                self._gradients(name, [*reversed(self.weights[number])])
        if not forward and self.stage == 2:
            self._send_rest(name)
        if (sent := self._handover(name, virtual_stage, virtual_stage + onward)) is not None:
            self._start(sent)

    def _numbers(self, work: Work) -> list[int]:
        """The blocks of a pass, in its order."""
        numbers = self.stages[work.chunk]
        return [*numbers] if work.kind == "forward" else [*reversed(numbers)]

    def _block(self, name: tuple[Any, ...], number: int, seconds: float) -> None:
        """A block's work, with the exchanges within it at equal distances, and those of stage 3 around its layers."""
        inside = [*self._inside(name, number)]
        events: list[tuple[float, Callable[[], None]]] = [
            ((at + 1) / len(inside), partial(self._wait_within, key)) for at, key in enumerate(inside)
        ]
        done = 0.0
        for at, event in sorted([*events, *self._around_layers(name)], key=itemgetter(0)):
            self.program.append(("work", (at - done) * seconds))
            done = at
            event()
        self.program.append(("work", (1 - done) * seconds))

    def _wait_within(self, key: Key) -> None:
        self._start(key)
        self.program.append(("wait", key))

    def _start(self, key: Key) -> None:
        self.program.append(("start", key))

    def _handle(self, kind: Kind, size: float) -> None:
        """Takes time from the rank's work for a tensor that travels meanwhile, but for its way."""
        cost = self.script.link.cost(kind, 0.0, len(self.shards if self.stage else self.replicas))
        self.program.append(("work", cost.start + cost.byte * size))

    # Activations ----------------------------------------------------------------------------------------------------

    def _inside(self, name: tuple[Any, ...], number: int) -> Iterator[Key]:
        """The exchanges within a block, for which its products wait."""
        between, degrees, script = self.script.between, self.degrees, self.script
        if between is None:
            return
        is_forward, is_end = name[1] == "forward", number in (0, len(script.blocks) - 1)
        size = between.size / script.micro_batches
        if degrees.tensor > 1:
            n, group = degrees.tensor, script.group(self.rank, ("tensor",))
            each = (n - 1) / n * size / degrees.sequence
            halves: tuple[Kind, ...] = ("all_gather", "reduce_scatter")  # of an all-reduce, and as many bytes
            for i in range(int((number == 0) == is_forward) if is_end else 2):
                for kind in halves if self.layout.sequence_parallel else ("all_reduce",):
                    bytes_ = 2 * each if kind == "all_reduce" else each
                    flows = dict.fromkeys(group, (bytes_, bytes_))
                    yield script.add((name, number, kind, i, group[0]), flows, "tensor", kind)
        if degrees.sequence > 1 and not is_end:
            n, group = degrees.sequence, script.group(self.rank, ("sequence",))
            each = (n - 1) / n**2 * size * between.attention / 4 / degrees.tensor
            for i in range(4):
                flows = dict.fromkeys(group, (each, each))
                yield script.add((name, number, "sequence", i, group[0]), flows, "sequence", "all_to_all")

    def _handover(self, name: tuple[Any, ...], source: int, target: int) -> Key:
        """The message from one virtual stage to another in this rank's column; None if there is none."""
        stages, script = self.degrees.pipeline, self.script
        virtual_stages = range(stages * self.layout.virtual_stages)
        if stages == 1 or script.between is None or not {source, target} <= {*virtual_stages}:
            return None
        column = script.group(self.rank, ("pipeline",))
        size = script.between.size / self.degrees.sequence / script.micro_batches
        size /= self.degrees.tensor if self.layout.sequence_parallel else 1
        sender, receiver = column[source % stages], column[target % stages]
        key = (name, "handover", source, target, column[0])
        flows = {sender: (size, 0.0), receiver: (0.0, size)}
        script.transfers.setdefault(key, Transfer(frozenset([sender]), flows, ("handover", name[1])))
        return key

    # Gradients ------------------------------------------------------------------------------------------------------

    def _bucket_size(self, total: float) -> float:
        """Bytes from which on a bucket leaves: on CPUs each gradient is pushed by itself."""
        if not self.layout.accelerator:
            return 0.0
        owners = self.degrees.sharding if self.stage else 1
        return min(max(total / MIN_BUCKETS / owners, SMALLEST), LARGEST)

    def _bytes(self, weight: Weight) -> float:
        return weight.local_size(self.degrees.tensor) * self.layout.gradient_on_its_way

    def _gradients(self, name: tuple[Any, ...], weights: Sequence[Weight]) -> None:
        """Sends gradients, in the order of backward."""
        for weight in weights:
            self._handle("push", self._bytes(weight))
            owner = self.owners.get(weight.name, 0)
            bucket = self._buckets.setdefault(owner, _Bucket())
            bucket.size += self._bytes(weight)
            if bucket.size >= max(self.bucket_size, 1.0):
                self._leave(name, owner, bucket)

    def _leave(self, name: tuple[Any, ...], owner: int, bucket: _Bucket) -> None:
        """Sends a bucket to its owner, or to all."""
        size, bucket.size, bucket.count = bucket.size, 0.0, bucket.count + 1
        key: Key = (name[0], "bucket", owner, bucket.count)
        if self.stage:
            stream: Key = ("owner", owner)
            if self.straight:
                key = self._to_replicas(key, owner, size, stream)
            else:
                key = self._owners_exchange(key, {owner: size}, sends=False, stream=stream)
            self._send_gradients(key, size if owner == self.shard else 0.0)
            if self.stage == 2 and self.layout.accelerator:
                self._wait_for_the_oldest(key, size)
        elif len(self.replicas) > 1:
            self._send_gradients(self._all_reduce(key, size, "gradients"), 0.0)

    def _wait_for_the_oldest(self, key: Key, size: float) -> None:
        """Stage 2 keeps few gradients in flight (`exchange.bucketed_gradients`)."""
        self._in_flight.append((key, size))
        while sum(size for _, size in self._in_flight) > self.most_in_flight:
            self.program.append(("wait", self._in_flight.popleft()[0]))

    def _send_gradients(self, key: Key, shard_size: float) -> None:
        self._start(key)
        self._sent.append(key)
        self._shard_size += shard_size

    def _all_reduce(self, key: Key, size: float, stream: Key) -> Key:
        n = len(self.replicas)
        each = 2 * (n - 1) / n * size
        flows = dict.fromkeys(self.replicas, (each, each))
        return self.script.add((key, self.replicas[0]), flows, stream, "all_reduce")

    def _to_replicas(self, key: Key, owner: int, size: float, stream: Key) -> Key:
        """A gradient's way on CPUs: from each rank a part to each of its owner's replicas."""
        ranks, part = self.script.group(self.rank, ("sharding", *REPLICA_AXES)), size / len(self.replicas)
        flows = {
            rank: (size - part, part * (len(ranks) - 1))
            if self.script.coords[rank]["sharding"] == owner
            else (size, 0.0)
            for rank in ranks
        }
        return self.script.add((key, ranks[0]), flows, stream, "send")

    def _send_rest(self, name: tuple[Any, ...]) -> None:
        for owner, bucket in sorted(self._buckets.items()):
            if bucket.size:
                self._leave(name, owner, bucket)

    def _end_gradients(self, step: int) -> None:
        """After backward: sends the rest, waits for all, and adds up the shard's sums of the replicas."""
        self._send_rest((step, "end"))
        self.program += [("wait", key) for key in self._sent]
        if self._shard_size and len(self.replicas) > 1:
            size = self._shard_size / (self.script.micro_batches if self.stage >= 2 else 1)
            # Of straight gradients only the sums remain, half of an all-reduce.
            key = self._all_reduce((step, "replicas"), size / 2 if self.straight else size, "replicas")
            self._start(key)
            self.program.append(("wait", key))
        self._buckets, self._sent, self._shard_size = {}, [], 0.0
        self._in_flight.clear()

    # ZeRO's parameters ----------------------------------------------------------------------------------------------

    def _sizes_by_owner(self, weights: Sequence[Weight], width: float) -> dict[int, float]:
        """Bytes of these parameters, of `width` bytes an element, by owner."""
        sizes: defaultdict[int, float] = defaultdict(float)
        for weight in weights:
            sizes[self.owners.get(weight.name, 0)] += weight.local_size(self.degrees.tensor) * width
        return sizes

    def _owners_exchange(self, key: Key, sizes: Mapping[int, float], sends: bool, stream: Key) -> Key:
        """A transfer of parts with an owner each, of these `sizes`: from it to all, or from all to it."""
        total, flows = sum(sizes.values()), {}
        for position, rank in enumerate(self.shards):
            mine = sizes.get(position, 0.0)
            to_others, others = (len(self.shards) - 1) * mine, total - mine
            flows[rank] = (to_others, others) if sends else (others, to_others)
        return self.script.add((key, self.shards[0]), flows, stream, "send")

    def _share_parameters(self, step: int, own_blocks: Sequence[int]) -> None:
        """Sends new parameters in the order of forward; on CPUs a rank waits for all of them."""
        keys = []
        for number in own_blocks:
            sizes = self._sizes_by_owner(self.weights[number], self.layout.widths.parameter)
            for owner, size in sorted(sizes.items()):
                keys.append(
                    self._owners_exchange((step, "new", number, owner), {owner: size}, True, ("owner", owner))
                )
                self._start(keys[-1])
        if not self.layout.accelerator:
            self.program += [("wait", key) for key in keys]

    def _need_new(self, step: int, name: tuple[Any, ...], number: int) -> None:
        """Waits for a block's new parameters on an accelerator, in the first forward after an update."""
        if self.stage in (1, 2) and step and name[1:] == ("forward", 0) and self.layout.accelerator:
            for owner in self._sizes_by_owner(self.weights[number], self.layout.widths.parameter):
                self.program.append(("wait", ((step - 1, "new", number, owner), self.shards[0])))

    # Stage 3 --------------------------------------------------------------------------------------------------------

    def _around_layers(self, name: tuple[Any, ...]) -> Iterator[tuple[float, Callable[[], None]]]:
        """What the next block's layers need, and the gradients that they send, each with the share of the block's work
        that comes before it: layers work by their matrices, twice as much in backward."""
        of_block = next(self._next_uses, [])
        sizes = [
            sum(weight.size for weight in use.weights if len(weight.shape) > 1) * (2 if use.gradients else 1)
            for use in of_block
        ]
        total = sum(sizes) or 1
        for use, before, size in zip(of_block, accumulate(sizes, initial=0), sizes, strict=False):
            yield before / total, partial(self._need, name, use)
            yield (before + size) / total, partial(self._compute_gradients, name, use)

    def _need(self, name: tuple[Any, ...], use: Use) -> None:
        """Asks for the chunks up to a layer's, and for the next ones; waits for what it needs of other owners."""
        while self._requested <= use.chunk + self.layout.prefetch:
            self._fetch(name[0], self._requested)
            self._requested += 1
        for weight in use.fetched:
            if self.owners[weight.name] != self.shard:
                self.program.append(("wait", self._fetched[use.chunk, weight.name]))
                self._handle("fetch", weight.local_size(self.degrees.tensor) * self.layout.widths.parameter)

    def _fetch(self, step: int, chunk: int) -> None:
        """A chunk's way: on CPUs owners reply to this rank's request, whatever they do; on an accelerator all ranks
        exchange it."""
        weights, width = self._fetched_in.get(chunk, []), self.layout.widths.parameter
        key: Key = (step, "fetch", chunk)
        if self.layout.accelerator:
            for part, of_part in self._exchanges(key, weights, width):
                self._start(
                    self._owners_exchange(part, self._sizes_by_owner(of_part, width), True, "fetches")
                )
                self._fetched |= {(chunk, weight.name): (part, self.shards[0]) for weight in of_part}
            return
        lacking = [weight for weight in weights if self.owners[weight.name] != self.shard]
        sizes = self._sizes_by_owner(lacking, width)
        flows = {self.shards[owner]: (size, 0.0) for owner, size in sizes.items()}
        flows[self.rank] = (0.0, sum(sizes.values()))
        if lacking:
            reply = Transfer(frozenset([self.rank]), flows, "fetches", messages=2)
            self.script.transfers[key, self.rank] = reply
            self._fetched |= dict.fromkeys(((chunk, weight.name) for weight in lacking), (key, self.rank))
            self._start((key, self.rank))

    def _exchanges(
        self, key: Key, weights: Sequence[Weight], width: float
    ) -> Iterator[tuple[Key, list[Weight]]]:
        """A chunk is exchanged at once where that takes its links no longer than one owner's part after another
        (`axes.sharding.broadcasts.Chunk.exchanges`)."""
        sizes = self._sizes_by_owner(weights, width)
        together = (len(self.shards) - 1) * max(sizes.values(), default=0.0) <= sum(sizes.values())
        if weights and together and len(sizes) == len(self.shards):
            yield (key, "all"), [*weights]
            return
        for number, weight in enumerate(weights):
            yield (key, number), [weight]

    def _compute_gradients(self, name: tuple[Any, ...], use: Use) -> None:
        """Sends a layer's gradients: on an accelerator a chunk leaves when the one before has come."""
        if not self.layout.accelerator:
            self._gradients(name, [weight for weight, _ in use.gradients])
            return
        for weight, is_last in use.gradients:
            self._handle("push", self._bytes(weight))
            self._gradient_chunk.append(weight)
            if is_last:
                self.program += [("wait", key) for key in self._reducing]
                self._reduce((name[0], "reduce", len(self._sent)))

    def _reduce(self, key: Key) -> None:
        """A chunk's gradients on their way to their owners."""
        self._reducing, width = [], self.layout.gradient_on_its_way
        for part, of_part in self._exchanges(key, self._gradient_chunk, width):
            sizes = self._sizes_by_owner(of_part, width)
            self._reducing.append(self._owners_exchange(part, sizes, sends=False, stream="gradients"))
            self._send_gradients(self._reducing[-1], sizes.get(self.shard, 0.0))
        self._gradient_chunk = []

    def _begin_pass(self, step: int) -> None:
        """Lets others fetch: on CPUs an owner replies once it has begun the same pass (`axes.sharding.pulled_params`),
        for which it has all gradients of the pass before."""
        if self.stage == 3 and not self.layout.accelerator:
            flows = dict.fromkeys(self.shards, (0.0, 0.0))
            begun: Key = (step, "begun", self.shards[0])
            self._start(self.script.add(begun, flows, "passes", "send"))
            self.program.append(("wait", begun))
