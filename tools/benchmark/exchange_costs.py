"""Measures what each kind of exchange takes beside its link: at its start, and for each byte.

    python -m paddle_dp launch --ranks 2 -m tools.benchmark.exchange_costs FILE DEVICE

The link must be without limit. Each exchange comes after products, as in a step: the longer they take, the colder is
whatever an exchange reads, and the less do ranks come to it at once. Ranks exchange in pairs, then in groups of each
other size that divides them, all groups at once. Rank 0 writes {kind: [[ranks, pause, start, byte], …]} into FILE:
ranks of a group, and seconds, from the medians of two sizes; products of three lengths. foretold.py runs it.

Also push: by how much longer a rank works on products if it hands a gradient to its owner after each of them
(exchange/pushed_gradients.py; on an accelerator bucketed_gradients.py); and on CPUs fetch: if it asks the owner for a
weight and takes it (axes/sharding/pulled_params.py).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F

from paddle_dp import gloo
from paddle_dp.axes.sharding.pulled_params import Pull
from paddle_dp.exchange.bucketed_gradients import BucketedGradients
from paddle_dp.exchange.pushed_gradients import PushReduce
from paddle_dp.mesh import Mesh, join
from paddle_dp.mesh.device import synchronize
from paddle_dp.mesh.messages import Push
from tools.benchmark import slow_device

TIMES = 25
TENSORS, PASSES = 16, 9  # that are pushed or fetched in a pass
PAUSES = 0.003, 0.01, 0.03  # seconds of products, roughly
ROWS, WIDTH = 256, 128  # of one product
SMALL, LARGE = 1024, 256 * 1024  # bytes of a tensor: of a few numbers, of a micro-batch's activations


def kinds(group: Any) -> dict[str, tuple[Callable[[Any], None], float]]:
    """By kind: the exchange of a tensor, and the bytes of its longer direction for each byte of the tensor."""
    ranks, (first, second) = group.nranks, group.ranks[:2]

    def gather(x: Any) -> None:
        dist.stream.all_gather(paddle.empty_like(x), x[: x.size // ranks], group=group, use_calc_stream=True)

    def scatter(x: Any) -> None:
        dist.stream.reduce_scatter(paddle.empty([x.size // ranks]), x, group=group, use_calc_stream=True)

    def there_and_back(x: Any) -> None:
        if group.rank == 0:
            dist.send(x, second)
            dist.recv(x, second)
        elif group.rank == 1:
            dist.recv(x, first)
            dist.send(x, first)

    share = (ranks - 1) / ranks
    return {
        "all_reduce": (lambda x: dist.all_reduce(x, group=group), 2 * share),
        "all_gather": (gather, share),
        "reduce_scatter": (scatter, share),
        "all_to_all": (lambda x: dist.alltoall_single(paddle.empty_like(x), x, group=group), share),
        "send": (there_and_back, 2.0),
    }


@dataclass(frozen=True)
class Pass:
    """Tensors that travel while a rank works: `begin` the pass, `handle` one after another, `end` the pass."""

    begin: Callable[[], Any]
    handle: Callable[[int], Any]
    end: Callable[[], Any]


def pushes(group: Any, device: str, size: int) -> Pass:
    """Hands gradients of `size` bytes to their owners, which are the ranks in turn."""
    weights = [paddle.create_parameter([size // 4], "float32") for _ in range(TENSORS)]
    owners = [group.ranks[number % group.nranks] for number in range(TENSORS)]

    def begin() -> None:
        for weight in weights:
            weight.grad = paddle.ones_like(weight)

    if device == "cpu":
        reduce = PushReduce(
            Push("gradients", group.ranks, group.ranks[group.rank]), weights, [[owner] for owner in owners]
        )
        return Pass(begin, reduce.send, reduce.finish)
    buckets = BucketedGradients(group, weights, owners=owners, each_micro_batch=True)

    def finish() -> None:
        with buckets.backward(last=True):
            pass
        buckets.finish()

    return Pass(begin, partial(buckets.ready, final=True), finish)


def fetches(group: Any, size: int) -> Pass:
    """Asks for the two weights of a layer, of `size` bytes, while the layer before is used, and takes them."""
    weights = [paddle.create_parameter([size // 4], "float32") for _ in range(TENSORS)]
    owners = [group.ranks[number // 2 % group.nranks] for number in range(TENSORS)]
    pull = Pull(group, weights, owners)

    def begin() -> None:
        pull.begin(None, ())
        pull.ask((0, 1))

    def fetch(number: int) -> None:
        if number % 2 == 0 and number + 2 < TENSORS:
            pull.ask((number + 2, number + 3))
        if owners[number] != group.ranks[group.rank]:
            pull.take(number)

    return Pass(begin, fetch, pull.finish)


class Meter:
    """Times exchanges after products, on all ranks of a mesh at once. `product`: the seconds of one, roughly."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._x, self._weight = paddle.ones([ROWS, WIDTH]), paddle.ones([WIDTH, WIDTH])
        self.products(20)
        self.product = statistics.mean(mesh.gather(self.products(50) / 50))

    def count(self, pause: float) -> int:
        """The number of products that take so many seconds."""
        return max(1, round(pause / self.product))

    def products(self, count: int) -> float:
        """Seconds of so many products."""
        began = time.perf_counter()
        for _ in range(count):
            F.linear(self._x, self._weight)
        synchronize(self.mesh.device)
        return time.perf_counter() - began

    def exchange(self, exchange: Callable[[Any], None], size: int, count: int) -> tuple[float, float]:
        """Seconds of so many products and of the exchange after them: the medians of a rank, in the mean of all."""
        numbers, times = paddle.ones([size // 4]), []
        for _ in range(TIMES):
            pause = self.products(count)
            began = time.perf_counter()
            exchange(numbers)
            synchronize(self.mesh.device)
            times.append((pause, time.perf_counter() - began))
        pauses, seconds = (statistics.median(each) for each in zip(*times, strict=True))
        return statistics.mean(self.mesh.gather(pauses)), statistics.mean(self.mesh.gather(seconds))

    def handling(self, tensors: Pass, count: int) -> float:
        """Seconds by which a pass makes its products longer: the median of a rank, in the mean of all."""
        longer = []
        for _ in range(PASSES):
            self.mesh.gather(0)
            plain = sum(self.products(count) for _ in range(TENSORS))
            tensors.begin()
            self.mesh.gather(0)
            began = time.perf_counter()
            for number in range(TENSORS):
                self.products(count)
                tensors.handle(number)
            longer.append(time.perf_counter() - began - plain)
            tensors.end()
            # Nothing travels during the next products, nor when this process ends.
            synchronize(self.mesh.device)
        return statistics.mean(self.mesh.gather(statistics.median(longer)))


def line(small: float, large: float, flow: float = 1.0) -> tuple[float, float]:
    """Seconds at the start and for each byte, from those for tensors of SMALL and of LARGE bytes, `flow` times as many
    of which travel."""
    byte = max(0.0, large - small) / (flow * (LARGE - SMALL))
    return max(0.0, small - byte * flow * SMALL), byte


def exchange_costs(
    meter: Meter, kind: str, exchange: Callable[[Any], None], flow: float
) -> list[list[float]]:
    """[pause, start, byte] for products of each length; `flow`: see `kinds`."""
    ways, costs = 2 if kind == "send" else 1, []  # there and back
    for count in map(meter.count, PAUSES):
        pause, small = meter.exchange(exchange, SMALL, count)
        _, large = meter.exchange(exchange, LARGE, count)
        start, byte = line(small, large, flow)
        costs.append([pause, start / ways, byte])
    return costs


def handling_costs(meter: Meter, make: Callable[[int], Pass], tensors: float) -> list[list[float]]:
    """[[pause, start, byte]] of one of the `tensors` that a rank handles in a pass."""
    count = meter.count(PAUSES[0])
    small, large = (meter.handling(make(size), count) / tensors for size in (SMALL, LARGE))
    return [[count * meter.product, *line(small, large)]]


def groups(mesh: Mesh) -> list[Any]:
    """This rank's groups of neighbours, of each size that divides the ranks: pairs first."""
    sizes = [size for size in range(2, mesh.ranks) if mesh.ranks % size == 0]
    made = [
        dist.new_group([*range(first, first + size)])  # all ranks make each group
        for size in sizes
        for first in range(0, mesh.ranks, size)
    ]
    return [group for group in made if mesh.rank in group.ranks] + [dist.get_group()]


def costs_in(group: Any, meter: Meter) -> dict[str, list[list[float]]]:
    """[pause, start, byte] of each kind of exchange within the group."""
    costs = {
        kind: exchange_costs(meter, kind, exchange, flow) for kind, (exchange, flow) in kinds(group).items()
    }
    # A rank pushes all gradients, also its own; it fetches what others own.
    costs["push"] = handling_costs(meter, partial(pushes, group, meter.mesh.device), TENSORS)
    if meter.mesh.device == "cpu":
        others = (group.nranks - 1) / group.nranks
        costs["fetch"] = handling_costs(meter, partial(fetches, group), TENSORS * others)
    return costs


def main() -> None:
    mesh = join(0, sys.argv[2])
    gloo.install(mesh.device)
    slow_device.install()
    meter = Meter(mesh)
    costs: dict[str, list[list[float]]] = {}
    for group in groups(mesh):
        for kind, measured in costs_in(group, meter).items():
            costs.setdefault(kind, []).extend([group.nranks, *cost] for cost in measured)
    if mesh.is_main:
        Path(sys.argv[1]).write_text(json.dumps(costs))


if __name__ == "__main__":
    main()
