"""One rank of the doctor's job: joins the others, sums numbers with them, and compares the clocks.

Paddle's launcher runs this file. The first rank of each node writes a report, as JSON.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":  # Python has put this file's folder first, whose files would hide packages
    sys.path[0] = os.getcwd()
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import socket
import statistics
import time
from collections.abc import Sequence
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.launch.failures import Failure
from paddle_dp.launch.rank_process import become_rank
from paddle_dp.launch.silence import import_paddle
from paddle_dp.mesh.environment import Environment
from paddle_dp.mesh.heartbeat import heartbeat

if TYPE_CHECKING:
    from paddle import Tensor

    from paddle_dp.mesh import Mesh

SIZE = 1 << 18  # numbers of 4 bytes: 1 MB
TIMES = 10
LOOKS = 7  # readings of the clock


def main() -> None:
    become_rank()
    device, report, here = sys.argv[1], Path(sys.argv[2]), Environment.read()
    try:
        import_paddle()
        first = first_sum(report.parent) if here.local_rank == 0 else None
        report_fields = exchange(device, first)
    except Exception as error:
        Failure.recorded(error, here.rank, report.parent)
        raise
    if here.local_rank == 0:
        report.write_text(json.dumps(report_fields))
    heartbeat.enter("done")


def first_sum(folder: Path) -> Path:
    """Returns the path of a file that exists as soon as all ranks have summed numbers once."""
    return folder / "first_sum"


def exchange(device: str, first: Path | None = None, megabytes: Sequence[int] = ()) -> dict[str, Any]:
    """Joins the mesh and exchanges with all ranks; creates the file `first` after the first sum. Collective.

    `megabytes`: sizes of further tensors, whose sums are timed, too.

    On return no device has anything left to send: each rank reads the last sum before it joins the next exchange.
    """
    import numpy as np
    import paddle

    from paddle_dp.mesh import join

    mesh = join(0, device)
    ramp = np.arange(SIZE, dtype="float32") % 1024
    tensor = paddle.to_tensor(ramp + mesh.rank)
    got = mesh.sum_tensor(tensor.clone()).numpy()
    expected = mesh.ranks * ramp + mesh.ranks * (mesh.ranks - 1) / 2
    mesh.sum([0.0])
    if first is not None:
        first.touch()
    seconds = _seconds_of_sum(mesh, tensor)
    sizes = {size: _seconds_of_sum(mesh, paddle.ones([size * SIZE])) for size in megabytes}
    clocks = []
    for _ in range(LOOKS):
        mesh.sum([0.0])  # all leave it within a millisecond or so
        clocks.append(time.time())
    right = bool((got == expected).all())
    reports = mesh.gather({"host": socket.gethostname(), "right": right, "clocks": clocks})
    differences = (map(sub, rank["clocks"], reports[0]["clocks"]) for rank in reports)
    return {
        "ranks": mesh.ranks, "device": mesh.device, "library": library(mesh.device), "seconds": seconds,
        "seconds_by_megabytes": sizes, "hosts": [rank["host"] for rank in reports],
        "wrong": [number for number, rank in enumerate(reports) if not rank["right"]],
        "skews": [*map(statistics.median, differences)],
    }  # fmt: skip


def _seconds_of_sum(mesh: Mesh, tensor: Tensor) -> float:
    """Returns the seconds of one sum of the tensor over all ranks, after one that is not timed. Collective."""
    mesh.sum_tensor(tensor.clone()).numpy()
    mesh.sum([0.0])
    began = time.perf_counter()
    for _ in range(TIMES):
        mesh.sum_tensor(tensor)
    tensor.numpy()  # waits for the device, as mesh.sum does not
    mesh.sum([0.0])
    return (time.perf_counter() - began) / TIMES


def library(device: str) -> str:
    """Returns the communication library, with its version."""
    import paddle

    if device.startswith("gpu"):
        return f"NCCL {paddle.version.nccl()}"
    return "gloo" if device == "cpu" else paddle.distributed.get_backend().lower()


if __name__ == "__main__":
    main()
