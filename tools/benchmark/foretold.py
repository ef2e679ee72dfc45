"""Foretold beside measured: every legal layout of a GPT and an MLP, over links of three speeds.

    python tools/benchmark/foretold.py                         # all of it: hours
    python tools/benchmark/foretold.py --on namespaces --nodes 2 --rounds 3 --csv foretold.csv --png foretold.png
    python tools/benchmark/foretold.py --on device --nodes 2 --models gpt --only "sharding 2"
    python tools/benchmark/foretold.py --table foretold.csv    # the table of earlier runs

Steps are foretold by step_events.py, with no constant fitted to a step. It gets the bytes of the layout by arithmetic,
the seconds that a rank computes from one process that trains 1/ranks of the batch alone, and the link:

namespaces  nodes are network namespaces on one switch, whose links `tc` shapes (namespaces.py; root is needed). The
            rate of many bytes is measured through one socket from node to node. Each node is a device of --node-flops,
            which sleeps: nodes share this machine's processors. With 0 it computes on them, all nodes at once.
device      ranks on the simulated accelerator (tests/sim; g++ is needed). Its products take the time of a device of
            --flops, and sleep; its link has the rate that it is told.

In both, exchange_costs.py measures what each kind of exchange takes beside its link.

On both sides the quickest quarter of the steps counts: whatever else the machine does slows down the others.
Rounds go through all layouts in turn, so that a busy minute is not one layout's; a row has the median of its rounds,
their spread, and how many processes wanted a processor meanwhile. Exit status 1 if a threshold is missed: a step of
100 ms or more at most 10 % off over namespaces, 7 % on the device; 3 if the machine was too busy to say.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.errors import PaddleDPError, UsageError
from paddle_dp.launch.silence import import_paddle
from paddle_dp.plan.bound import Compute
from paddle_dp.plan.legal import layouts
from paddle_dp.units import LinkSpeed
from tests.sim.build import built
from tests.sim.build import why_not as why_no_device
from tools.benchmark.compute import quick, variables
from tools.benchmark.forecast import Forecast
from tools.benchmark.link_events import Cost, Kind, Link
from tools.benchmark.namespaces import BURST_BYTES, Cluster, cluster, why_not
from tools.benchmark.overlap import windows
from tools.benchmark.run_job import run_job
from tools.benchmark.slow_device import VARIABLE
from tools.benchmark.step_events import step_seconds
from tools.benchmark.wire import Bench

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPES = {
    "namespaces": {"gpt": HERE / "gpt_wire.yaml", "mlp": HERE / "mlp_25mb.yaml"},
    "device": {"gpt": HERE / "gpt_sim.yaml", "mlp": HERE / "mlp_sim.yaml"},
}
SPEEDS = {
    "namespaces": ("1 Gbit/s", "300 Mbit/s", "100 Mbit/s"),
    "device": ("20 MB/s", "8 MB/s", "3 MB/s"),
}
UNLIMITED = LinkSpeed.parse("20 Gbit/s")  # what the kernel carries from node to node is less
LIMITS = {"namespaces": 10.0, "device": 7.0}  # percent
LEAST = 0.1  # seconds of a step that thresholds speak of
FLOPS = 2e9  # of a simulated device: so slow that what Python takes on a shared core is a small part
NODE_FLOPS = 5e9  # of a node: a fifth of a core's, so that two of them do not wait for each other's products
LATENCY = 1e-4  # seconds of a simulated link's message
CUT_JOBS, CUT_STEPS = 3, 12  # that measure what a rank with cut layers computes
DEVICE_STEPS = 12  # the first four do not count
BUSY = 0.5  # processes beside ours that want a processor: with more, no verdict
FAILURES = (
    RuntimeError,
    TimeoutError,
    subprocess.SubprocessError,
    PaddleDPError,
)  # of one job; others are worth knowing
MICRO_BATCHES = 4
BATCH = 16  # of the GPT: 4 ranks have a sample in each micro-batch


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout of a model: its name, and the overrides that make it."""

    model: str
    ranks: int
    name: str
    words: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Seconds of a step, foretold and measured: the median of the rounds, the fastest and the slowest. `load`: the
    processes that wanted a processor before the rounds began, in the mean."""

    place: str
    model: str
    layout: str
    ranks: int
    link: str
    foretold: float
    bound: float
    measured: float
    low: float
    high: float
    rounds: int
    load: float

    @property
    def off(self) -> float:
        """Percent that the forecast is above the measurement."""
        return 100 * (self.foretold / self.measured - 1)


def choices(recipe: Path, model: str, ranks: int) -> Iterator[Choice]:
    """Every legal layout of a model on so many ranks whose bytes are counted: degrees, stages of sharding,
    sequence_parallel, virtual stages. Activations are counted for transformers only."""
    from paddle_dp.recipe import read_recipe
    from paddle_dp.verbs.forecast import between, layout_of

    for degrees in layouts(ranks):
        stages = (1, 2, 3) if degrees.sharding > 1 else (1,)
        along = (False, True) if degrees.tensor > 1 else (False,)
        chunks = (1, 2) if degrees.pipeline > 1 else (1,)
        for stage, parallel, chunk in ((s, a, c) for s in stages for a in along for c in chunks):
            settings = [
                f"{axis}: {degrees[axis]}" for axis in ("data", "sharding", "sequence", "pipeline", "tensor")
            ]
            settings += [f"sharding_stage: {stage}"] if stage > 1 else []
            settings += ["sequence_parallel: true"] if parallel else []
            settings += ["pipeline_schedule: interleaved, virtual_stages: 2"] if chunk > 1 else []
            words = (
                f"strategy={{use: hybrid, {', '.join(settings)}}}",
                f"train.micro_batches={MICRO_BATCHES}",
                *([f"train.batch={BATCH}"] if model == "gpt" else []),
            )
            try:
                layout = layout_of(read_recipe(recipe, words), ranks)
            except UsageError:
                continue
            counted = between(read_recipe(recipe, words), layout) is not None
            if not counted and max(degrees.tensor, degrees.sequence, degrees.pipeline) > 1:
                continue
            name = str(degrees) + (f", stage {stage}" if degrees.sharding > 1 else "")
            name += ", sequence_parallel" * parallel + f", {chunk} stages a rank" * (chunk > 1)
            yield Choice(model=model, ranks=ranks, name=name, words=tuple(words))


def waiting() -> float:
    """The processes that want a processor now, without this one."""
    return max(0.0, float(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1)


class Site:
    """Somewhere to train: a recipe for each model, links of some speeds, and seconds of compute."""

    name: str

    def __init__(self, links: Sequence[LinkSpeed]) -> None:
        self.links = links

    def recipe(self, model: str) -> Path:
        return RECIPES[self.name][model]

    def words(self, choice: Choice) -> list[str]:
        """The layout's overrides here."""
        return [*choice.words]

    def rows(self, choice: Choice, times: Sequence[Sequence[float]], loads: Sequence[float]) -> Iterator[Row]:
        """A row for each link, of the seconds of each round and link."""
        forecast = Forecast.of(self.recipe(choice.model), self.words(choice), choice.ranks)
        compute = self.rank_compute(choice, forecast)
        for speed, *measured in zip(self.links, *times, strict=True):
            link = self.link(speed, choice.ranks)
            yield Row(
                place=self.name, model=choice.model, layout=choice.name, ranks=choice.ranks, link=str(speed),
                foretold=foretold(forecast, compute, link), bound=forecast.milliseconds(compute, link.rate)[0] / 1e3,
                measured=statistics.median(measured), low=min(measured), high=max(measured), rounds=len(measured),
                load=statistics.mean(loads),
            )  # fmt: skip

    def rank_compute(self, choice: Choice, forecast: Forecast) -> Compute:
        """Of a rank, from a process alone that makes as many passes through a layer: a stage has 1/pipeline of all.
        Measured beside each layout's job: within ten minutes the same steps take 5 % more or less."""
        passes = max(1, MICRO_BATCHES // forecast.layout.degrees.pipeline)
        words = [f"train.batch={forecast.batch // choice.ranks}", f"train.micro_batches={passes}"]
        return forecast.compute(self.compute(self.recipe(choice.model), words))

    def compute(self, recipe: Path, words: list[str]) -> Compute:
        raise NotImplementedError

    def link(self, speed: LinkSpeed, ranks: int) -> Link:
        raise NotImplementedError

    def steps(self, choice: Choice) -> list[float]:
        """Seconds of a step over each link."""
        raise NotImplementedError


def foretold(forecast: Forecast, compute: Compute, link: Link) -> float:
    """Seconds of a step. The compute was measured in one process: sums of micro-batches, and of ranks, are its own."""
    return step_seconds(
        forecast.blocks, forecast.layout, forecast.order.micro_batches, forecast.between, compute, link
    )


class Namespaces(Site):
    """Nodes that are network namespaces; a job trains over each of the links."""

    name = "namespaces"

    def __init__(
        self, box: Cluster, folder: Path, links: Sequence[LinkSpeed], steps: int, flops: float
    ) -> None:
        super().__init__(links)
        self.flops = flops
        self.bench = Bench(box, folder, links, steps, flops, typical=quick)
        box.limit(UNLIMITED)
        file = folder / "costs.json"
        self.bench.launched("tools.benchmark.exchange_costs", [str(file), "cpu"])
        self._costs = read_costs(file)
        self._links = {str(speed): self._probed(speed) for speed in links}

    def words(self, choice: Choice) -> list[str]:
        return [*choice.words, "train.device=cpu"]

    def compute(self, recipe: Path, words: list[str]) -> Compute:
        command = [sys.executable, str(HERE / "compute.py"), str(recipe), *words]
        reports = [json.loads(text.splitlines()[-1]) for text in self.bench.on_all(command)]
        return Compute(**{name: statistics.mean(each[name] for each in reports) for name in reports[0]})

    def rank_compute(self, choice: Choice, forecast: Forecast) -> Compute:
        """Cut layers do more than their share: norms are not cut, and cutting adds operations. They are measured where
        the link has no limit, without the exchanges and what they wait for."""
        if forecast.layout.degrees.tensor == 1:
            return super().rank_compute(choice, forecast)
        bench = Bench(self.bench.box, self.bench.folder, [UNLIMITED], CUT_STEPS, self.flops)
        jobs = []
        for _ in range(CUT_JOBS):
            bench.job(self.recipe(choice.model), self.words(choice))
            events = map(json.loads, bench.latest.read_text().splitlines())
            ranks = [rank for event in events if event["event"] == "measured" for rank in event["ranks"]]
            phases = ("forward", "backward", "update")
            jobs.append(
                Compute(**{phase: statistics.mean(rank[phase] for rank in ranks) for phase in phases})
            )
        return min(jobs, key=lambda compute: compute.total)

    def link(self, speed: LinkSpeed, ranks: int) -> Link:
        return self._links[str(speed)]

    def _probed(self, speed: LinkSpeed) -> Link:
        """The rate of many bytes through one socket from each node to the next at once."""
        self.bench.box.limit(speed)
        large = round(speed.bytes_per_second * 0.5) + BURST_BYTES
        small, most = (self.bench.carried(size) for size in (1, large))
        rate = (large - BURST_BYTES) / (most - small)
        return Link(rate=rate, burst=BURST_BYTES, costs=self._costs)

    def steps(self, choice: Choice) -> list[float]:
        milliseconds, _ = self.bench.job(self.recipe(choice.model), self.words(choice))
        return [each / 1e3 for each in milliseconds]


class Device(Site):
    """Ranks on the simulated accelerator; a job trains over one link."""

    name = "device"

    def __init__(self, links: Sequence[LinkSpeed], flops: float, steps: int) -> None:
        super().__init__(links)
        self.variables = {**variables(), "CUSTOM_DEVICE_ROOT": str(built()), VARIABLE: str(flops)}
        self._steps, self._costs = steps, dict[int, dict[Kind, list[Cost]]]()

    def compute(self, recipe: Path, words: list[str]) -> Compute:
        done = subprocess.run(
            [sys.executable, str(HERE / "compute.py"), str(recipe), *words],
            env={**os.environ, **self.variables}, check=True, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        return Compute(**json.loads(done.stdout.splitlines()[-1]))

    def link(self, speed: LinkSpeed, ranks: int) -> Link:
        if ranks not in self._costs:
            self._costs[ranks] = self._probed(ranks)
        return Link(rate=speed.bytes_per_second, costs=self._costs[ranks])

    def _probed(self, ranks: int) -> dict[Kind, list[Cost]]:
        with tempfile.TemporaryDirectory(prefix="foretold-") as folder:
            words = ["-m", "paddle_dp", "launch", "--ranks", str(ranks), "--out", f"{folder}/logs"]
            report = Path(folder, "costs.json")
            subprocess.run(
                [sys.executable, *words, "-m", "tools.benchmark.exchange_costs", str(report), "auto"], cwd=ROOT,
                env={**os.environ, **self.variables, "SIM_LATENCY": str(LATENCY)}, check=True, capture_output=True,
                text=True, timeout=300,
            )  # fmt: skip
            return read_costs(report)

    def steps(self, choice: Choice) -> list[float]:
        return [self._step(choice, speed) for speed in self.links]

    def _step(self, choice: Choice, speed: LinkSpeed) -> float:
        slow = {"SIM_BANDWIDTH": f"{speed.bytes_per_second:.0f}", "SIM_LATENCY": str(LATENCY)}
        with tempfile.TemporaryDirectory(prefix="foretold-") as folder:
            run_job(
                "tools.benchmark.slow_device:train", self.recipe(choice.model), choice.ranks, folder,
                overrides=[*choice.words, f"train.length={self._steps} steps"],
                variables={**self.variables, **slow}, timeout=600,
            )  # fmt: skip
            return quick(windows(Path(folder, "run", "metrics.jsonl")))


def read_costs(file: Path) -> dict[Kind, list[Cost]]:
    return {
        kind: [Cost(pause=pause, start=start, byte=byte) for pause, start, byte in costs]
        for kind, costs in json.loads(file.read_text()).items()
    }


def measured(site: Site, wanted: Sequence[Choice], rounds: int, failed: list[str]) -> Iterator[Row]:
    """The rows of these layouts: each round goes through all of them. A round that fails is named in `failed`."""
    times: dict[Choice, list[list[float]]] = {choice: [] for choice in wanted}
    loads: dict[Choice, list[float]] = {choice: [] for choice in wanted}
    for number in range(rounds):
        for choice in wanted:
            try:
                load = waiting()
                times[choice].append(site.steps(choice))
                loads[choice].append(load)
            except FAILURES as error:
                failed.append(f"{site.name}, {choice.model}, {choice.name}")
                print(f"{failed[-1]} failed: {error}", file=sys.stderr, flush=True)
            if number == rounds - 1 and times[choice]:
                yield from site.rows(choice, times[choice], loads[choice])


def table(rows: Sequence[Row]) -> str:
    """Markdown: a line for each layout and link."""
    heads = [
        "",
        "model",
        "layout",
        "ranks",
        "link",
        "foretold, ms",
        "measured, ms",
        "rounds",
        "off",
        "bound, ms",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        spread = f"{1e3 * row.low:.0f} … {1e3 * row.high:.0f}" if row.rounds > 1 else "1"
        cells = [row.place, row.model, row.layout, str(row.ranks), row.link, f"{1e3 * row.foretold:.0f}"]
        cells += [f"{1e3 * row.measured:.0f}", spread, f"{row.off:+.0f} %", f"{1e3 * row.bound:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(rows: Sequence[Row]) -> tuple[list[str], int]:
    """Sentences on each place and number of ranks, and the exit status."""
    lines, status = [], 0
    for place, ranks in dict.fromkeys((row.place, row.ranks) for row in rows):
        here = [row for row in rows if (row.place, row.ranks) == (place, ranks)]
        judged = [abs(row.off) for row in here if row.measured >= LEAST]
        limit, load = LIMITS[place], statistics.mean(row.load for row in here)
        head = f"{place}, {ranks} ranks: {len(here)} steps, {len(judged)} of them of {1e3 * LEAST:.0f} ms or more"
        if not judged:
            lines.append(head)
            continue
        within = sum(off <= limit for off in judged)
        lines.append(
            f"{head}: {statistics.mean(judged):.1f} % off in the mean, {statistics.median(judged):.1f} % in the "
            f"median, {max(judged):.1f} % at most; {within} within {limit:g} %. Beside them {load:.1f} processes "
            "wanted a processor"
        )
        if within < len(judged):
            status = max(status, 3 if load > BUSY else 1)
    lines += ["The machine was busy: no verdict."] if status == 3 else []
    return lines, status


def picture(rows: Sequence[Row], file: Path) -> None:
    """Measured against foretold seconds, a panel for each place."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = list(dict.fromkeys(row.place for row in rows))
    figure, panels = pyplot.subplots(1, len(places), figsize=(5.5 * len(places), 5), squeeze=False)
    for panel, place in zip(panels[0], places, strict=True):
        here = [row for row in rows if row.place == place]
        ends = [0.8 * min(row.foretold for row in here), 1.25 * max(row.measured for row in here)]
        limit = LIMITS[place] / 100
        panel.fill_between(
            ends, [e * (1 - limit) for e in ends], [e * (1 + limit) for e in ends], color="#dbe9f6",
            label=f"within {LIMITS[place]:g} %",
        )  # fmt: skip
        panel.plot(ends, ends, color="#7b8794", linewidth=1)
        for number, kind in enumerate(dict.fromkeys((row.model, row.ranks) for row in here)):
            some = [row for row in here if (row.model, row.ranks) == kind]
            panel.errorbar(
                [row.foretold for row in some], [row.measured for row in some],
                yerr=[[row.measured - row.low for row in some], [row.high - row.measured for row in some]],
                fmt="os^D"[number % 4], markersize=4, linewidth=0.8, label=f"{kind[0]}, {kind[1]} ranks",
            )  # fmt: skip
        panel.set(xscale="log", yscale="log", xlabel="foretold, s", ylabel="measured, s", title=place)
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> int:
    options, failed = arguments(), list[str]()
    if options.table:
        rows = [read(line) for file in options.table for line in csv.DictReader(file.open())]
    else:
        import_paddle()  # first: it takes SIGTERM for itself, and would end this process with the nodes still there
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every `finally`
        rows = []
        for row in all_rows(options, failed):
            rows.append(row)
            print(
                f"{row.place}, {row.model}, {row.layout} over {row.link}: {1e3 * row.foretold:.0f} ms foretold, "
                f"{1e3 * row.measured:.0f} ms measured",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            if options.csv:
                write(rows, options.csv)
    if not rows:
        print("nothing was measured", file=sys.stderr)
        return 2
    lines, status = verdict(rows)
    print(table(rows), "", *lines, *(f"failed: {name}" for name in failed), sep="\n")
    if options.png:
        picture(rows, options.png)
    return max(status, 1) if failed else status


def all_rows(options: argparse.Namespace, failed: list[str]) -> Iterator[Row]:
    """The rows of each place that this machine has; a sentence for one that it has not."""
    for place, ranks in itertools.product(options.on, options.nodes):
        links = options.links or [LinkSpeed.parse(speed) for speed in SPEEDS[place]]
        wanted = [
            choice
            for model in options.models
            for choice in choices(RECIPES[place][model], model, ranks)
            if not options.only or any(choice.name.startswith(name) for name in options.only)
        ]
        with ExitStack() as stack:
            reason, site = site_of(place, ranks, links, options, stack)
            if site is None:
                print(f"{place}, {ranks} ranks: skipped: {reason}", file=sys.stderr, flush=True)
            else:
                yield from measured(site, wanted, options.rounds, failed)


def site_of(
    place: str, ranks: int, links: Sequence[LinkSpeed], options: argparse.Namespace, stack: ExitStack
) -> tuple[str, Site | None]:
    """The site, whose namespaces and files live as long as `stack`; or the reason why it is not here."""
    if reason := why_not() if place == "namespaces" else why_no_device():
        return reason, None
    if place == "device":
        return "", Device(links, options.flops, DEVICE_STEPS)
    try:
        box = stack.enter_context(cluster(ranks))
        box.limit(links[0])
    except (OSError, subprocess.SubprocessError) as error:
        return f"this kernel makes no namespaces or no shaped links: {error}", None
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foretold-")))
    return "", Namespaces(box, folder, links, options.steps, options.node_flops)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--on", nargs="+", choices=[*SPEEDS], default=[*SPEEDS], help="(default: both)")
    parser.add_argument("--nodes", nargs="+", type=int, default=[2, 4], choices=range(2, 9), metavar="N")
    parser.add_argument("--models", nargs="+", choices=["gpt", "mlp"], default=["gpt", "mlp"])
    parser.add_argument("--links", nargs="+", type=LinkSpeed.parse, metavar="SPEED", help="(default: three)")
    parser.add_argument("--only", nargs="+", metavar="LAYOUT", help="beginnings of their names")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="over each link, in namespaces")
    parser.add_argument(
        "--flops", type=float, default=FLOPS, help=f"of a simulated device (default {FLOPS:g})"
    )
    parser.add_argument(
        "--node-flops", type=float, default=NODE_FLOPS,
        help=f"each node is a device of so many FLOP/s, which sleeps; 0: a processor (default {NODE_FLOPS:g})",
    )  # fmt: skip
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, nargs="+", metavar="CSV", help="measure nothing, show these")
    options = parser.parse_args()
    options.steps += options.steps % 2
    return options


def write(rows: Sequence[Row], file: Path) -> None:
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, [*asdict(rows[0])])
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def read(line: Mapping[str, str]) -> Row:
    """A row from a line of a CSV file."""
    kinds = get_type_hints(Row)
    settings: dict[str, Any] = {name: kinds[name](text) for name, text in line.items()}
    return Row(**settings)


if __name__ == "__main__":
    sys.exit(main())
