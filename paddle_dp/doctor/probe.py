"""Measures this machine's rates in a job of real ranks (`probe_rank.py`), for forecasts by `plan` and `scale`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from paddle_dp.doctor.prove import Bench, variables_for
from paddle_dp.errors import JobError
from paddle_dp.launch.machine import Machine, available_memory
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.plan.probe import CollectiveTiming, KernelTiming, Probe, ProductTiming

RANK = "paddle_dp.doctor.probe_rank"
SIZES = (64 << 10, 1 << 20, 8 << 20, 64 << 20)  # bytes of a collective's tensor
Shape = tuple[int, int, int]  # m, n, k


@contextmanager
def bench_for(ranks: int, device: str, minutes: float) -> Iterator[Bench]:
    """Yields a bench on devices if there are enough for the ranks, else on the CPU, where each rank has an equal share
    of the processors, alone as well as among all ranks."""
    here = Machine.here()
    kind = here.kind if device != "cpu" and len(here.devices) >= ranks else "cpu"
    with scratch_folder("paddle-dp-scale-") as scratch:
        variables = variables_for(here.kind, kind, scratch)
        if kind == "cpu":
            variables.setdefault("OMP_NUM_THREADS", str(max(1, here.cores // ranks)))
        yield Bench(ranks, kind, scratch, time.monotonic() + 60 * minutes, variables)


def measured_rates(bench: Bench, dtype: str, shapes: Sequence[Shape] = ()) -> Probe:
    """Measures products (squares, and these shapes), kernels and collectives in `dtype`. Raises JobError with the
    cause if the job fails, TimeoutError if it takes too long."""
    dtype = "float32" if bench.is_cpu else dtype
    request = {"device": "cpu" if bench.is_cpu else "auto", "dtype": dtype, "shapes": shapes, "sizes": SIZES}
    report = rank_report(bench, bench.ranks, "rates", json.dumps(request))
    machine, here = report["machine"], Machine.here()
    ranks = report["ranks"]
    node = len(here.devices) if not bench.is_cpu else max(1, here.cores // max(1, report["threads"]))
    cards = machine["cards"] if not bench.is_cpu else []
    memory = cards[0].get("memory") if cards else (available_memory() or machine["memory"]) / node
    return Probe(
        kind=bench.kind, dtype=dtype, ranks=ranks, node=node, threads=report["threads"] if bench.is_cpu else 0,
        memory=float(memory or 0.0), library=report["library"],
        machine={name: machine[name] for name in ("processor", "processors", "memory", "cards")},
        versions=machine["versions"],
        products=tuple(ProductTiming(**row) for row in report["products"]),
        kernels=tuple(KernelTiming(**row) for row in report["kernels"]),
        collectives=tuple(CollectiveTiming(**row) for row in report["collectives"]),
    )  # fmt: skip


def rank_report(bench: Bench, ranks: int, task: str, *arguments: str) -> dict[str, Any]:
    """Runs the task of `probe_rank.py` on so many ranks and returns its report. Raises JobError with the last words of
    a job that failed, TimeoutError if there is no time."""
    name = f"{task}-{ranks}-{time.monotonic_ns()}"
    file = bench.folder / f"{name}.json"
    words = ("launch", "--ranks", str(ranks), "--out", name, "-m", RANK, task, str(file), *arguments)
    result = bench.verb(*words)
    if result.status or not file.exists():
        late = f"it was ended after {result.seconds:.0f} s" if result.late else f"status {result.status}"
        raise JobError(
            "\n".join([f"the measurement of {task} on {ranks} ranks failed ({late}):", *result.last_lines])
        )
    return json.loads(file.read_text("utf-8"))
