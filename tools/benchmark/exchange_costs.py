"""Measures what each kind of exchange takes beside its link: at its start, and for each byte.

    python -m paddle_dp launch --ranks 2 -m tools.benchmark.exchange_costs FILE DEVICE

The link must be without limit. Each exchange comes after products, as in a step: the longer they take, the colder is
whatever an exchange reads, and the less do ranks come to it at once. Rank 0 writes {kind: [[pause, start, byte], …]}
into FILE: seconds, from the medians of two sizes; products of three lengths. foretold.py runs it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMES = 25
PAUSES = 0.003, 0.01, 0.03  # seconds of products, roughly
ROWS, WIDTH = 256, 128  # of one product
SMALL, LARGE = 1024, 256 * 1024  # bytes of a tensor: of a few numbers, of a micro-batch's activations


def kinds(rank: int, ranks: int) -> dict[str, tuple[Callable[[Any], None], float]]:
    """By kind: the exchange of a tensor, and the bytes of its longer direction for each byte of the tensor."""
    import paddle
    import paddle.distributed as dist

    def gather(x: Any) -> None:
        dist.stream.all_gather(paddle.empty_like(x), x[: x.size // ranks], use_calc_stream=True)

    def scatter(x: Any) -> None:
        dist.stream.reduce_scatter(paddle.empty([x.size // ranks]), x, use_calc_stream=True)

    def there_and_back(x: Any) -> None:
        if rank == 0:
            dist.send(x, 1)
            dist.recv(x, 1)
        elif rank == 1:
            dist.recv(x, 0)
            dist.send(x, 0)

    share = (ranks - 1) / ranks
    return {
        "all_reduce": (dist.all_reduce, 2 * share),
        "all_gather": (gather, share),
        "reduce_scatter": (scatter, share),
        "all_to_all": (lambda x: dist.alltoall_single(paddle.empty_like(x), x), share),
        "send": (there_and_back, 2.0),
    }


def main() -> None:
    from paddle_dp.launch.silence import import_paddle

    import_paddle()
    import paddle
    import paddle.nn.functional as F

    from paddle_dp import gloo
    from paddle_dp.doctor.probe_rank import wait
    from paddle_dp.mesh import join
    from tools.benchmark import slow_device

    mesh = join(0, sys.argv[2])
    gloo.install(mesh.device)

    slow_device.install()
    x, weight = paddle.ones([ROWS, WIDTH]), paddle.ones([WIDTH, WIDTH])

    def products(count: int) -> float:
        """Seconds of so many products."""
        began = time.perf_counter()
        for _ in range(count):
            F.linear(x, weight)
        wait(mesh.device)
        return time.perf_counter() - began

    def medians(exchange: Callable[[Any], None], size: int, count: int) -> tuple[float, float]:
        """Seconds of the products and of the exchange: the medians of a rank, in the mean of all."""
        numbers, times = paddle.ones([size // 4]), []
        for _ in range(TIMES):
            pause = products(count)
            began = time.perf_counter()
            exchange(numbers)
            wait(mesh.device)
            times.append((pause, time.perf_counter() - began))
        pauses, seconds = (statistics.median(each) for each in zip(*times, strict=True))
        return statistics.mean(mesh.gather(pauses)), statistics.mean(mesh.gather(seconds))

    products(20)
    product = statistics.mean(mesh.gather(products(50) / 50))
    costs: dict[str, list[list[float]]] = {}
    for kind, (exchange, flow) in kinds(mesh.rank, mesh.ranks).items():
        ways = 2 if kind == "send" else 1  # there and back
        for count in (max(1, round(pause / product)) for pause in PAUSES):
            pause, small = medians(exchange, SMALL, count)
            _, large = medians(exchange, LARGE, count)
            byte = max(0.0, large - small) / (flow * (LARGE - SMALL))
            costs.setdefault(kind, []).append([pause, max(0.0, (small - byte * flow * SMALL) / ways), byte])
    if mesh.is_main:
        Path(sys.argv[1]).write_text(json.dumps(costs))


if __name__ == "__main__":
    main()
