"""Measures this machine's rates in a job of real ranks (`probe_rank.py`), for forecasts by `plan` and `scale`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paddle_dp.doctor.prove import Bench, variables_for
from paddle_dp.doctor.prove_rank import processor
from paddle_dp.errors import JobError, UsageError
from paddle_dp.launch.machine import Machine, available_memory, cores
from paddle_dp.launch.scratch import scratch_folder
from paddle_dp.plan.probe import CollectiveTiming, KernelTiming, Probe, ProductTiming
from paddle_dp.plan.scaling import MeasuredSteps
from paddle_dp.text import plural

RANK = "paddle_dp.doctor.probe_rank"
SIZES = (64 << 10, 1 << 20, 8 << 20, 64 << 20)  # bytes of a collective's tensor
PLAIN = ("callbacks=[]", "guard={}")  # what surrounds a step is no part of it
Shape = tuple[int, int, int]  # m, n, k


@contextmanager
def bench_for(ranks: int, device: str, minutes: float) -> Iterator[Bench]:
    """Yields a bench on this machine's devices, or without any on the CPU, where each rank has an equal share of the
    processors, alone as well as among all ranks. Raises UsageError for more ranks than devices."""
    here = Machine.here()
    kind = here.kind if device != "cpu" and here.devices else "cpu"
    if kind != "cpu" and ranks > len(here.devices):
        raise UsageError(
            f"--ranks {ranks}: {plural(len(here.devices), 'device')} can be seen here. Give as many ranks, or "
            "train.device=cpu to measure the processor."
        )
    with scratch_folder("paddle-dp-scale-") as scratch:
        variables = variables_for(here.kind, kind, scratch)
        if kind == "cpu":
            variables.setdefault("OMP_NUM_THREADS", str(max(1, here.cores // ranks)))
        yield Bench(ranks, kind, scratch, time.monotonic() + 60 * minutes, variables, Path.cwd())


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
        kind=bench.kind, dtype=dtype, ranks=ranks, node=max(node, ranks),
        threads=report["threads"] if bench.is_cpu else 0, memory=float(memory or 0.0), library=report["library"],
        machine={name: machine[name] for name in ("processor", "processors", "memory", "cards")},
        versions=machine["versions"],
        products=tuple(ProductTiming(**row) for row in report["products"]),
        kernels=tuple(KernelTiming(**row) for row in report["kernels"]),
        collectives=tuple(CollectiveTiming(**row) for row in report["collectives"]),
    )  # fmt: skip


def check_machine(probe: Probe, bench: Bench, file: Path) -> None:
    """Raises UsageError if the probe in the file is of another machine, or of other ranks than the bench's."""
    here = (processor(), cores(), bench.kind, bench.ranks, int(bench.variables.get("OMP_NUM_THREADS", "0")))
    there = (
        probe.machine.get("processor"), probe.machine.get("processors"), probe.kind, probe.ranks,
        probe.threads if bench.is_cpu else here[-1],
    )  # fmt: skip
    if here != there:
        names = ("processor", "processors", "device", "ranks", "threads")
        other = ", ".join(
            f"{name} {theirs}, not {ours}"
            for name, theirs, ours in zip(names, there, here, strict=True)
            if theirs != ours
        )
        raise UsageError(f"--measured {file}: it was measured elsewhere ({other}): measure again.")


def measured_scaling(
    bench: Bench, recipe: Path, overrides: Sequence[str], batch: int, micro_batches: int
) -> list[MeasuredSteps]:
    """Trains some steps on one rank and on the bench's ranks in turn: with `batch` on each rank, and with `batch` in
    all or what a rank then has, as far as the micro-batches divide it."""
    ranks = max(bench.ranks, 2)
    runs = [(1, batch), (bench.ranks, bench.ranks * batch), (1, batch // ranks), (bench.ranks, batch)]
    possible = [
        (count, size)
        for count, size in dict.fromkeys(runs)
        if size and size % (count * micro_batches) == 0 and (size > batch // ranks or batch % ranks == 0)
    ]
    folder = bench.folder / "run"
    settings = [*overrides, *PLAIN, f"output_dir={json.dumps(str(folder))}"]
    if bench.is_cpu:
        settings.append("train.device=cpu")
    report = rank_report(bench, bench.ranks, "steps", str(recipe), json.dumps(possible), *settings)
    return [
        MeasuredSteps.from_rounds(row["ranks"], row["batch"] / row["ranks"], row["rounds"])
        for row in report["steps"]
    ]  # fmt: skip


def rank_report(bench: Bench, ranks: int, task: str, *arguments: str) -> dict[str, Any]:
    """Runs the task of `probe_rank.py` on so many ranks and returns its report. Raises JobError with the last words of
    a job that failed, TimeoutError if there is no time."""
    name = f"{task}-{ranks}-{time.monotonic_ns()}"
    file = bench.folder / f"{name}.json"
    command = (
        "launch",
        "--ranks",
        str(ranks),
        "--out",
        str(bench.folder / name),
        "-m",
        RANK,
        task,
        str(file),
        *arguments,
    )
    result = bench.verb(*command)
    if result.status or not file.exists():
        late = f"it was ended after {result.seconds:.0f} s: give more --minutes" if result.late else ""
        late = late or f"status {result.status}"
        raise JobError(
            "\n".join([f"the measurement of {task} on {ranks} ranks failed ({late}):", *result.last_lines])
        )
    return json.loads(file.read_text("utf-8"))
