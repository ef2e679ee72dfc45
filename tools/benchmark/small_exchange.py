"""Measures how long a small all-reduce takes after a pause: what any exchange costs beside its bytes.

    python -m paddle_dp launch --ranks 2 -m tools.benchmark.small_exchange FILE DEVICE

Rank 0 writes the median seconds into FILE, as JSON. foretold.py runs it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

TIMES, PAUSE = 41, 0.004  # how often; seconds between two: products, in a step
ELEMENTS = 256


def main() -> None:
    from paddle_dp.launch.silence import import_paddle

    import_paddle()
    import paddle
    import paddle.distributed as dist

    from paddle_dp import gloo
    from paddle_dp.doctor.probe_rank import wait
    from paddle_dp.mesh import join

    mesh = join(0, sys.argv[2])
    gloo.install(mesh.device)
    numbers, times = paddle.ones([ELEMENTS]), []
    for _ in range(TIMES):
        time.sleep(PAUSE)
        began = time.perf_counter()
        dist.all_reduce(numbers)
        wait(mesh.device)
        times.append(time.perf_counter() - began)
    seconds = statistics.mean(mesh.gather(statistics.median(times)))
    if mesh.is_main:
        Path(sys.argv[1]).write_text(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
