"""Measures this machine's rates in a job of real ranks (`probe_rank.py`), for forecasts by `plan` and `scale`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_dp.doctor.bench import Bench
from paddle_dp.doctor.prove_rank import processor
from paddle_dp.errors import UsageError
from paddle_dp.launch.machine import Machine, available_memory, cores
from paddle_dp.plan.probe import CollectiveTiming, KernelTiming, Probe, ProductTiming
from paddle_dp.plan.scaling import MeasuredSteps

SIZES = (64 << 10, 1 << 20, 8 << 20, 64 << 20)  # bytes of a collective's tensor
PLAIN = ("callbacks=[]", "guard={}", "train.batch_ramp=null")  # a step alone, without its surroundings
Shape = tuple[int, int, int]  # m, n, k


def measured_rates(bench: Bench, dtype: str, shapes: Sequence[Shape] = ()) -> Probe:
    """Measures products (squares, and these shapes), kernels and collectives in `dtype`. Raises JobError with the
    cause if the job fails, TimeoutError if it takes too long."""
    dtype = "float32" if bench.is_cpu else dtype
    request = {"device": "cpu" if bench.is_cpu else "auto", "dtype": dtype, "shapes": shapes, "sizes": SIZES}
    report = _report(bench, "rates", json.dumps(request))
    machine, here = report["machine"], Machine.here()
    ranks, cards = report["ranks"], [] if bench.is_cpu else machine["cards"]
    node = len(here.devices) if not bench.is_cpu else max(1, here.cores // max(1, report["threads"]))
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
        rows = zip(names, there, here, strict=True)
        other = ", ".join(f"{name} {theirs}, not {ours}" for name, theirs, ours in rows if theirs != ours)
        raise UsageError(f"--measured {file}: it was measured elsewhere ({other}): measure again.")


def measured_scaling(
    bench: Bench, recipe: Path, overrides: Sequence[str], batch: int, micro_batches: int
) -> list[MeasuredSteps]:
    """Trains some steps on one rank and on the bench's ranks in turn: with `batch` on each rank, and with `batch` in
    all or a rank's share of it, as far as the micro-batches divide it."""
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
    report = _report(bench, "steps", str(recipe), json.dumps(possible), *settings)
    rows = report["steps"]
    return [
        MeasuredSteps.from_rounds(row["ranks"], row["batch"] / row["ranks"], row["rounds"]) for row in rows
    ]


def _report(bench: Bench, task: str, *arguments: str) -> dict[str, Any]:
    subject = f"the measurement of {task} on {bench.ranks} ranks"
    return bench.measured(subject, task, *arguments, advice=": give more --minutes")
