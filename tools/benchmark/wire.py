"""Measures each layout over links of chosen speeds: a cluster in a box, one rank on each node. Needs root.

    python tools/benchmark/wire.py                     # two nodes, all layouts; 20 Gbit/s, 1 Gbit/s, 300 Mbit/s
    python tools/benchmark/wire.py --nodes 4 --links "1 Gbit/s"
    python tools/benchmark/wire.py --only "sharding 2" --torch ~/torch/bin/python --csv wire.csv --png wire.png
    python tools/benchmark/wire.py --recipe FILE --strategies "use: data_parallel" "use: data_parallel, exchange: after"
    python tools/benchmark/wire.py --table wire.csv --png wire.png   # the table and the picture of earlier runs

Nodes are network namespaces on one switch (namespaces.py); each job is `paddle-dp train --nodes N` on all of them, over
gloo, with one thread a rank. While a job trains, its links are set to one speed after the other. Milliseconds are the
median over a speed's steps, but for its first ones; megabytes are what leaves a node in one step, counted at its
interface between steps, so that starting is no part of them, as the mean over the nodes. Beside them: the formula's
bytes and the bound (paddle_dp/plan/exchange.py, bound.py), from the seconds that a rank computes in a step, which are
measured first, on all nodes at once; and the wire alone: as many bytes through one socket from each node to the next.
With --torch, PyTorch's DistributedDataParallel trains the same MLP over gloo in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.plan.bound import Compute
from paddle_dp.units import LinkSpeed
from tools.benchmark.compute import command, mean_compute, variables
from tools.benchmark.forecast import Forecast
from tools.benchmark.namespaces import Cluster, cluster, end_on_sigterm, ended, events, going_on, why_not
from tools.benchmark.slow_device import VARIABLE
from tools.benchmark.wire_table import Row, bytes_table, picture, table
from tools.command_line import ROOT, paddle_dp, parser_of, tell
from tools.tables import read_csv, write_csv

HERE = Path(__file__).resolve().parent
MLP, GPT, LLAMA = (HERE / f"{name}.yaml" for name in ("mlp_25mb", "gpt_wire", "llama_wire"))
STEPS = 12  # at each speed
FIRST = 2  # steps at each speed that do not count
LEAST = 24  # in all: what is sent ahead crosses the first and the last line that count
EVERY = 2  # steps from one line of metrics to the next
# Steps of a job with servers, at least: its bytes are counted over all of them, to half a step's.
OF_SERVERS = 36


@dataclass(frozen=True)
class Layout:
    """What the table calls it, its recipe, and its strategy; `{n}` is the number of nodes, of which it needs some."""

    name: str
    recipe: Path
    strategy: str
    least_nodes: int = 2

    def words(self, nodes: int) -> list[str]:
        return [f"strategy={{{self.strategy.format(n=nodes)}}}"]


LAYOUTS = [
    Layout("data_parallel", MLP, "use: data_parallel"),
    Layout("1 server", MLP, "use: parameter_server, servers: 1"),
    Layout("2 servers", MLP, "use: parameter_server, servers: 2", least_nodes=3),
    Layout("data {n}", MLP, "use: hybrid, data: {n}"),
    *(
        Layout(f"sharding {{n}}, stage {s}", MLP, f"use: hybrid, sharding: {{n}}, sharding_stage: {s}")
        for s in (1, 2, 3)
    ),
    # With 4 micro-batches.
    Layout("sharding {n}, stage 3, gpt", GPT, "use: hybrid, sharding: {n}, sharding_stage: 3"),
    Layout("tensor {n}", GPT, "use: hybrid, tensor: {n}"),
    Layout("tensor {n}, sequence_parallel", GPT, "use: hybrid, tensor: {n}, sequence_parallel: true"),
    Layout("sequence {n}", GPT, "use: hybrid, sequence: {n}"),
    Layout("pipeline {n}", GPT, "use: hybrid, pipeline: {n}"),
    Layout("tensor {n}, llama", LLAMA, "use: hybrid, tensor: 2, data: auto"),
    Layout(
        "tensor {n}, sequence_parallel, llama",
        LLAMA,
        "use: hybrid, tensor: 2, data: auto, sequence_parallel: true",
    ),
]
WIRE, DDP = "the wire alone", "PyTorch DDP"


def main() -> int:
    given, failed = arguments(), list[str]()
    if given.table:
        rows = read_csv(Row, *given.table)
    else:
        if reason := why_not():
            print(reason, file=sys.stderr)
            return 2
        end_on_sigterm()
        rows = []
        with cluster(given.nodes) as box, tempfile.TemporaryDirectory(prefix="wire-") as folder:
            bench = Bench(box, Path(folder), given.links, given.steps)
            failed = bench.failed
            chosen = [Layout(words, given.recipe, words) for words in given.strategies] or LAYOUTS
            for row in bench.rows(chosen, given.only, given.torch):
                rows.append(row)
                tell(f"{row.layout} over {row.link}: {row.ms:.0f} ms, {row.mb:.2f} MB")
                if given.csv:
                    write_csv(rows, given.csv)
    print(bytes_table(rows), table(rows), sep="\n\n")
    if given.png:
        picture(rows, given.png)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, default=2, choices=range(2, 9), metavar="N")
    links = [LinkSpeed.parse(text) for text in ("20 Gbit/s", "1 Gbit/s", "300 Mbit/s")]
    parser.add_argument("--links", nargs="+", type=LinkSpeed.parse, default=links, metavar="SPEED")
    parser.add_argument("--only", nargs="+", default=[], metavar="LAYOUT", help="beginnings of their names")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help=f"at each speed (default {STEPS}); 24 or more in all"
    )
    parser.add_argument(
        "--strategies", nargs="+", default=[], metavar="WORDS", help="these instead: 'use: data_parallel'"
    )
    parser.add_argument("--recipe", type=Path, default=MLP, metavar="FILE", help="of --strategies")
    parser.add_argument("--torch", metavar="PYTHON", help="an interpreter that has torch")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, nargs="+", metavar="CSV", help="measure nothing, show these")
    given = parser.parse_args()
    least = max(6, LEAST // len(given.links))
    given.steps = max(least, given.steps) + max(least, given.steps) % EVERY
    return given


class Bench:
    """Jobs on one cluster, one after another."""

    def __init__(
        self,
        box: Cluster,
        folder: Path,
        links: Sequence[LinkSpeed],
        steps: int,
        flops: float = 0.0,
        typical: Callable[[Iterable[float]], float] = statistics.median,
    ):
        """`flops`: each rank is a device of so many FLOP/s, which sleeps (slow_device.py); 0: it is a processor.
        `typical`: one number of a speed's times."""
        self.variables = {**variables(), **({VARIABLE: str(flops)} if flops else {})}
        self.box, self.folder, self.links, self.steps, self.typical = box, folder, links, steps, typical
        self._port, self._computed = 9700, dict[Path, Compute]()
        self.failed: list[str] = []
        self.latest = Path()  # metrics of the latest job

    def rows(self, layouts: Sequence[Layout], only: Sequence[str], torch: str | None) -> Iterator[Row]:
        def wanted(name: str) -> bool:
            return not only or any(name.startswith(each) for each in only)

        nodes = self.box.size
        if wanted(WIRE) and layouts is LAYOUTS:
            yield from self.wire(whole_bytes(MLP) * 2 * (nodes - 1) / nodes)
        if torch and wanted(DDP):
            yield from self.torch(torch)
        for layout in layouts:
            if nodes >= layout.least_nodes and wanted(layout.name.format(n=nodes)):
                with going_on(layout.name.format(n=nodes), self.failed):
                    yield from self.layout(layout)

    def layout(self, layout: Layout) -> Iterator[Row]:
        """Trains one layout over every link."""
        nodes, words = self.box.size, layout.words(self.box.size)
        forecast = Forecast.of(layout.recipe, words, nodes)
        alone = self.compute(layout.recipe, forecast.batch // nodes)
        took, size = self.job(layout.recipe, words)
        for link, ms in zip(self.links, took, strict=True):
            best, worst = forecast.milliseconds(alone, link.bytes_per_second)
            yield Row(
                layout=layout.name.format(n=nodes), nodes=nodes, link=str(link), ms=ms, bound_ms=best,
                exposed_ms=worst, mb=size / 1e6, formula_mb=forecast.bytes / 1e6,
            )  # fmt: skip

    def wire(self, size: float) -> Iterator[Row]:
        """So many bytes from each node to the next, at once."""
        for link in self.links:
            self.box.limit(link)
            ms = 1e3 * self.carried(round(size))
            yield Row(
                layout=WIRE, nodes=self.box.size, link=str(link), ms=ms, mb=size / 1e6, formula_mb=size / 1e6
            )

    def carried(self, size: int) -> float:
        """Seconds of so many bytes from each node to the next at once, the median of three times."""
        addresses = [self.box.address(node) for node in range(self.box.size)]
        command = [sys.executable, str(HERE / "carry.py"), str(size), *addresses]
        return statistics.median(
            max(float(text.split()[-1]) for text in self.on_all(command)) for _ in range(3)
        )

    def torch(self, python: str) -> Iterator[Row]:
        """The same MLP under PyTorch's DistributedDataParallel."""
        nodes, log = self.box.size, self.folder / "ddp.jsonl"
        self._port += 1
        settings = {
            "steps": self.steps * len(self.links), "every": EVERY, "batch": 256 // nodes, "ranks": nodes,
            "master": self._master, "out": str(log), "interface": self.box.interface,
        }  # fmt: skip
        script = [python, str(HERE / "ddp.py")]
        commands = [[*script, json.dumps({**settings, "rank": node})] for node in range(nodes)]
        took, size = self.followed(commands, log, self.steps)
        formula = whole_bytes(MLP) * 2 * (nodes - 1) / nodes
        for link, ms in zip(self.links, took, strict=True):
            yield Row(layout=DDP, nodes=nodes, link=str(link), ms=ms, mb=size / 1e6, formula_mb=formula / 1e6)

    def compute(self, recipe: Path, batch: int) -> Compute:
        """What a rank computes in a step, measured on all nodes at once; in the mean of the nodes."""
        if recipe not in self._computed:
            self._computed[recipe] = mean_compute(self.on_all(command(recipe, [f"train.batch={batch}"])))
        return self._computed[recipe]

    def on_all(self, command: list[str]) -> list[str]:
        """What a command printed on each node."""
        logs = [self.folder / f"out-{node}" for node in range(self.box.size)]
        wait(self.box.start_all([command] * len(logs), logs, self.variables), logs)
        return [log.read_text() for log in logs]

    def launched(self, module: str, arguments: list[str]) -> None:
        """Runs a module as a distributed script on all nodes."""
        self._port += 1
        nodes, folder = self.box.size, Path(tempfile.mkdtemp(dir=self.folder))
        logs = [folder / f"out-{node}" for node in range(nodes)]
        commands = [
            paddle_dp("launch", *self._node(node, folder / f"{node}"), "-m", module, *arguments)
            for node in range(nodes)
        ]
        wait(self.box.start_all(commands, logs, {**self.variables, "PYTHONPATH": str(ROOT)}), logs)

    def job(self, recipe: Path, words: list[str]) -> tuple[list[float], float]:
        """Milliseconds of a step over each link, and bytes that leave a node in a step."""
        nodes, folder = self.box.size, Path(tempfile.mkdtemp(dir=self.folder))
        self.latest = folder / "run-0" / "metrics.jsonl"
        steps = self.steps_with(words)
        self._port += 1
        overrides = [*words, f"train.length={steps * len(self.links)} steps"]
        commands = [self._command(recipe, overrides, node, folder / f"run-{node}") for node in range(nodes)]
        return self.followed(commands, self.latest, steps)

    def _command(self, recipe: Path, overrides: list[str], node: int, folder: Path) -> list[str]:
        """Trains on one node."""
        if VARIABLE not in self.variables:
            return paddle_dp("train", recipe, *self._node(node, folder), *overrides)
        job = {
            "entry_point": "tools.benchmark.slow_device:train", "recipe": str(recipe), "ranks": 1, "quiet": True,
            "nodes": self.box.size, "master": self._master, "node_rank": node, "output_dir": str(folder),
            "overrides": overrides,
        }  # fmt: skip
        return [sys.executable, str(HERE / "run_job.py"), json.dumps(job)]

    @property
    def _master(self) -> str:
        return f"{self.box.address(0)}:{self._port}"

    def _node(self, node: int, folder: Path) -> list[str]:
        """The options of a node's one rank, which writes into a folder."""
        nodes = ["--nodes", str(self.box.size), "--master", self._master, "--node-rank", str(node)]
        return ["--ranks", "1", *nodes, "--out", str(folder)]

    def steps_with(self, words: Sequence[str]) -> int:
        """Steps at each speed of a job with these overrides."""
        if not any("parameter_server" in word for word in words):
            return self.steps
        of_each = -(-OF_SERVERS // len(self.links))
        return max(self.steps, of_each + of_each % EVERY)

    def followed(self, commands: list[list[str]], metrics: Path, steps: int) -> tuple[list[float], float]:
        """Runs a job, sets its links to the next speed every so many steps, and counts at each line of its metrics."""
        self.box.limit(self.links[0])
        logs = [self.folder / f"out-{node}" for node in range(self.box.size)]
        path = {"PYTHONPATH": str(ROOT)} if commands[0][0] == sys.executable else {}
        processes = self.box.start_all(commands, logs, {**self.variables, **path})
        took: list[list[float]] = [[] for _ in self.links]
        counts: list[tuple[int, float]] = []
        with ended(processes, logs):
            for event in (e for e in events(metrics, processes, 600.0) if e["event"] == "step"):
                step = event["step"]
                place, within = divmod(step - 1, steps)
                counts.append((step, statistics.mean(self.box.sent(process) for process in processes)))
                if within >= FIRST + EVERY - 1:
                    took[place].append(1e3 * event["seconds_per_step"])
                if within == steps - 1 and place + 1 < len(self.links):
                    self.box.limit(self.links[place + 1])
        counts = counts[FIRST // EVERY : -1]  # after the last step the nodes say goodbye
        # The median, for now and then a step measures where its time goes, and exchanges once more for that.
        size = statistics.median((b - a) / (t - s) for (s, a), (t, b) in itertools.pairwise(counts))
        if any("parameter_server" in word for word in commands[0]):
            # A server writes its line while its values travel: some intervals miss a step's, others have two. Nothing
            # is exchanged once more there. Over 8 steps of one server the rate was 8 % too low, over 32 it is 1.4 %.
            (first, before), (last, after) = counts[0], counts[-1]
            size = (after - before) / (last - first)
        return [self.typical(each) for each in took], size


def wait(processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    """Waits up to 300 s for each process, and ends all. Raises as `check` does."""
    with ended(processes, logs):
        for process in processes:
            process.wait(timeout=300)


def whole_bytes(recipe: Path) -> int:
    """Of a recipe's parameters, in float32."""
    from paddle_dp.axes.meta_init import size_of
    from paddle_dp.recipe import read_recipe

    return 4 * (size_of(read_recipe(recipe).model.build) or 0)


if __name__ == "__main__":
    sys.exit(main())
