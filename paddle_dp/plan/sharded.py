"""Refuses settings that sharding cannot run, before any process starts; cuts stage 3's parameters into chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from statistics import mean, median

WIDE = 1.5  # a chunk has at most 1.5 typical layers per rank; more than 4 ranks count as 4
RANKS = 4
# A chunk's fixed cost, in bytes of a typical layer: it makes a norm share a chunk with a matrix.
LAUNCH = 1 / 64


def unshardable(sharding: int, pipeline: int, offload: bool, tied: bool, device: str) -> str | None:
    """The reason why sharding cannot run, with the remedy, or None.

    `tied`: the model's head uses the embedding's weights; `device`: "cpu" or "gpu".
    """
    if offload and device == "cpu":
        return (
            "strategy.offload moves optimizer states from a GPU's memory to the host's, and there is no GPU here: "
            "set strategy.offload=false."
        )
    if offload and sharding == 1:
        return "strategy.offload belongs to sharding: set strategy.sharding to 2 or more, or strategy.offload=false."
    if tied and sharding > 1 and pipeline > 1:
        return (
            "strategy: tied weights lie on two stages of a pipeline, and sharding would give each a separate owner. "
            "Set model.tied=false, strategy.sharding=1 or strategy.pipeline=1."
        )
    return None


def chunks(loads: Sequence[Sequence[int]]) -> list[int]:
    """The chunk of each layer. `loads`: the bytes of each layer's parameters at each owner, [layers, owners].

    A parameter has one owner, so one alone would use one direction of one link. A chunk is some consecutive layers; the
    cuts minimise the bytes of each chunk's busiest owner, summed over chunks. A typical layer has the median size of
    the layers above the mean.
    """
    sizes = [sum(load) for load in loads]
    if not any(sizes):
        return [0] * len(sizes)
    average, ranks = mean(sizes), len(loads[0])
    typical = median(size for size in sizes if size >= average)
    widest = WIDE * min(ranks, RANKS) * typical
    # A layer has few parameters, and so few owners: of 1024 ranks only theirs are added.
    owned = [[(owner, size) for owner, size in enumerate(load) if size] for load in loads]
    cost, begins = [0.0], [0]  # best cost of the first n layers; first layer of their last chunk
    for end in range(1, len(loads) + 1):
        have, busiest, total, best = dict[int, int](), 0, 0, (float("inf"), 0)
        for begin in range(end - 1, -1, -1):
            for owner, size in owned[begin]:
                have[owner] = have.get(owner, 0) + size
                busiest = max(busiest, have[owner])
            total += sizes[begin]
            if begin < end - 1 and total > widest:
                break
            best = min(best, (cost[begin] + ranks * busiest + LAUNCH * typical, begin))
        cost.append(best[0])
        begins.append(best[1])
    firsts, end = set(), len(loads)
    while end:
        end = begins[end]
        firsts.add(end)
    ordered = sorted(firsts)
    return [bisect_right(ordered, layer) - 1 for layer in range(len(loads))]


@lru_cache(maxsize=8)
def travels(order: tuple[int, ...], loads: tuple[tuple[int, ...], ...], prefetch: int) -> list[bool]:
    """Whether the parameters of each layer in this `order` have to be fetched.

    They are still held if the layer's previous use is at most `prefetch` chunks back. `loads`: the bytes of each layer
    at each owner, [layers, owners]. In a training `TraceRecorder.order` (axes/sharding/prefetch_trace.py) decides it;
    tests/plan/test_sharded.py holds the two equal.
    """
    numbers = chunks([loads[layer] for layer in order]) if prefetch else range(len(order))
    last: dict[int, int] = {}
    fetches = []
    for position, layer in enumerate(order):
        before = last.get(layer)
        fetches.append(before is None or numbers[position] > numbers[before + 1] + prefetch)
        last[layer] = position
    return fetches


def max_fetched(loads: Sequence[Sequence[int]], owner: int, prefetch: int, first: int = 0) -> int:
    """The largest number of bytes of other owners' parameters that one owner holds.

    The layers of `loads` run forward, then backward, with `prefetch` chunks under way in addition to the current one.
    `first`: the first layer that learns; backward ends there.
    """
    order = [*loads, *reversed(loads[first:])]
    numbers = chunks(order) if prefetch else range(len(order))
    chunk_loads = [0] * len(order)
    for number, load in zip(numbers, order, strict=True):
        chunk_loads[number] += sum(load) - load[owner]
    return max(sum(chunk_loads[at : at + 1 + prefetch]) for at in range(len(order)))


def most_on_accelerator(loads: Sequence[Sequence[int]], owner: int, prefetch: int) -> int:
    """The largest number of bytes that an owner holds in addition to its parameters and the sums of their gradients, on
    an accelerator. `prefetch` is 1 at least.

    It holds the other owners' parameters, as in `max_fetched`; the copies of its parameters that it sends, freed when a
    chunk is first read; the gradients of the chunk in backward; and of the chunk before it the gradients, their sent
    copies and the received ones (`axes/sharding/broadcasts.py`). They use the memory of sums that do not exist yet.
    `loads` as there, in bytes of parameters; gradients have the same width.
    """
    layers, ranks = len(loads), len(loads[0])
    order = [*loads, *reversed(loads)]
    numbers, gradient_chunks = chunks(order), [*chunks(order[layers:]), -1]
    local, remote = ([0] * (numbers[-1] + 1 + prefetch) for _ in range(2))  # per chunk
    for number, load in zip(numbers, order, strict=True):
        local[number] += load[owner]
        remote[number] += sum(load) - load[owner]
    most = sums = 0
    local_gradients = remote_gradients = 0  # gradients of the chunk in backward
    my_sent = their_sent = 0  # and of the chunk before it
    for at, number in enumerate(numbers):
        is_read = at > 0 and numbers[at - 1] == number
        fetched = sum(remote[number : number + 1 + prefetch])
        copies = (ranks - 1) * sum(local[number + is_read : number + 1 + prefetch])
        most = max(most, fetched + copies)
        if at < layers:
            continue
        local_gradients += order[at][owner]
        remote_gradients += sum(order[at]) - order[at][owner]
        resident = fetched + copies + local_gradients + remote_gradients + sums
        before = my_sent + their_sent + (ranks - 1) * my_sent
        most = max(most, resident + before)
        if gradient_chunks[at - layers] != gradient_chunks[at - layers + 1]:  # the chunk is complete
            exchanged = remote_gradients + (ranks - 1) * local_gradients
            most = max(most, resident + my_sent + max(before, exchanged))
            sums += my_sent
            my_sent, their_sent, local_gradients, remote_gradients = local_gradients, remote_gradients, 0, 0
    return most - sum(load[owner] for load in loads)
