"""Measures on the simulated accelerator how much of each layout's exchange hides behind compute. Needs g++, no GPU.

    python tools/benchmark/overlap.py                          # every layout on 2 or 4 ranks: 25 minutes
    python tools/benchmark/overlap.py --only "sharding 2"

The accelerator (tests/sim) has asynchronous streams and collectives over a link that sleeps; its products take the
time of a device of --flops (slow_device.py), and sleep, too: what overlaps is real, whatever else this machine does.
For each layout the link is chosen so that the bytes of its formula take as long as its compute, which one process
measures. A row has the bound (paddle_dp/plan/bound.py), the step, and the step with SIM_SYNC=1, in which each call of a
stream is carried out at once, so that nothing overlaps.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.plan.bound import Compute
from tests.sim.build import built, why_not
from tools.benchmark.compute import mean_compute, printed, variables
from tools.benchmark.forecast import Forecast
from tools.benchmark.run_job import run_job
from tools.benchmark.slow_device import VARIABLE
from tools.command_line import parser_of
from tools.tables import table_head, table_row

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "gpt_sim.yaml"
# About 2 s of products a step: 1.3 million multiplications for each of 128 tokens, forward. So slow, because ranks
# share the cores of this machine with each other and with what else runs there: what Python takes is then a small part.
FLOPS = 1e9
STEPS = 20
EVERY = 4  # steps: metrics of the recipe
LATENCY = "1e-4"


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: int
    strategy: str
    micro_batches: int = 1

    @property
    def words(self) -> list[str]:
        return [f"strategy={{{self.strategy}}}", f"train.micro_batches={self.micro_batches}"]


LAYOUTS = [
    # Of 11 MB: by default all gradients are in one bucket.
    Layout("data_parallel", 2, "use: data_parallel, comm_buffer_size: 1 MB"),
    Layout("data 2", 2, "use: hybrid, data: 2"),
    *(
        Layout(f"sharding 2, stage {s}", 2, f"use: hybrid, sharding: 2, sharding_stage: {s}")
        for s in (1, 2, 3)
    ),
    Layout("tensor 2", 2, "use: hybrid, tensor: 2"),
    Layout("data 2 × tensor 2", 4, "use: hybrid, data: 2, tensor: 2"),
    Layout("pipeline 2", 2, "use: hybrid, pipeline: 2", 4),
    Layout("data 2 × pipeline 2", 4, "use: hybrid, data: 2, pipeline: 2", 4),
]
NAMES = [
    "layout", "ranks", "MB a step", "link, MB/s", "compute, ms", "bound", "step", "ratio", "nothing overlaps", "ratio",
]  # fmt: skip


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="LAYOUT", help="beginnings of their names")
    parser.add_argument("--flops", type=float, default=FLOPS, help=f"of a device (default {FLOPS:g})")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"a multiple of 4 (default {STEPS})")
    given = parser.parse_args()
    if reason := why_not():
        print(reason, file=sys.stderr)
        return 2
    device = device_variables(given.flops)
    print(table_head(NAMES))
    alone: dict[tuple[int, int], Compute] = {}
    for layout in LAYOUTS:
        if not given.only or any(layout.name.startswith(each) for each in given.only):
            key = layout.ranks, layout.micro_batches
            if key not in alone:
                alone[key] = compute(layout, device)
            print(row(layout, alone[key], device, given.steps), flush=True)
    return 0


def row(layout: Layout, alone: Compute, device: dict[str, str], steps: int) -> str:
    """The table's line of a layout."""
    forecast = Forecast.of(RECIPE, layout.words, layout.ranks)
    own = forecast.compute(alone)
    link = forecast.bytes / own.total
    best, _ = forecast.milliseconds(alone, link)
    slow = {**device, "SIM_BANDWIDTH": f"{link:.0f}", "SIM_LATENCY": LATENCY}
    # Medians of means over 4 steps, of which the first ones do not count.
    took, exposed = (
        1e3 * statistics.median(job_windows(layout.ranks, layout.words, steps, {**slow, "SIM_SYNC": sync}))
        for sync in "01"
    )
    cells = [f"{forecast.bytes / 1e6:.2f}", f"{link / 1e6:.1f}", f"{1e3 * own.total:.0f}", f"{best:.0f}"]
    cells += [f"{took:.0f}", f"{took / best:.2f}", f"{exposed:.0f}", f"{exposed / best:.2f}"]
    return table_row([layout.name, layout.ranks, *cells])


def compute(layout: Layout, device: dict[str, str]) -> Compute:
    """What one process with a rank's share of the batch computes in a step."""
    batch = Forecast.of(RECIPE, layout.words, layout.ranks).batch // layout.ranks
    words = [f"train.batch={batch}", f"train.micro_batches={min(layout.micro_batches, batch)}"]
    return mean_compute([printed(RECIPE, words, device)])


def device_variables(flops: float) -> dict[str, str]:
    """Those of a rank on the simulated accelerator, of so many FLOP/s."""
    return {**variables(), "CUSTOM_DEVICE_ROOT": str(built()), VARIABLE: str(flops)}


def job_windows(
    ranks: int, words: Sequence[str], steps: int, device: dict[str, str], recipe: Path = RECIPE
) -> list[float]:
    """The `windows` of a job with these overrides, for so many steps on that device."""
    with tempfile.TemporaryDirectory(prefix="device-") as folder:
        run_job(
            "tools.benchmark.slow_device:train", recipe, ranks, folder,
            overrides=[*words, f"train.length={steps} steps"], variables=device, timeout=600,
        )  # fmt: skip
        return [*windows(Path(folder, "run", "metrics.jsonl"))]


def windows(metrics: Path) -> Iterator[float]:
    """Seconds per step of each line of a job's metrics but the first."""
    for line in map(json.loads, metrics.read_text().splitlines()):
        if line["event"] == "step" and line["step"] > EVERY:
            yield line["seconds_per_step"]


if __name__ == "__main__":
    sys.exit(main())
