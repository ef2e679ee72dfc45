"""Trains the same task under every strategy, over links of chosen speeds: a cluster in a box. Needs root.

    python tools/benchmark/strategies.py --csv ways.csv --png ways.png      # all of it: more than an hour
    python tools/benchmark/strategies.py --tasks digits --workers 2 --links "100 Mbit/s" --only data_parallel
    python tools/benchmark/strategies.py --faults               # a rank that is slow, and one that is killed
    python tools/benchmark/strategies.py --table ways.csv --png ways.png      # of earlier runs
    python tools/benchmark/strategies.py --page docs/which-strategy.md --png docs/pictures/strategies.png

Each row is one whole training by `paddle-dp train`, with so many --workers, one thread a rank, and the servers of a
parameter_server beside them: digits and a small GPT, 2 and 4 workers, three links. "loopback": all ranks on one node.
Else one rank on each node: network namespaces on one switch (namespaces.py), whose links carry so much in each
direction; what is one process is measured once. Held-out loss is taken at equal steps, and the
target is a held-out loss. Seconds and bytes are those of training, without its start and its evaluations; bytes are
counted at the interfaces: what a worker sends in the mean, and, where it differs, what the busiest node sends.
A training that takes longer than 90 seconds is ended; its row then says how far it came.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.units import LinkSpeed
from tools.benchmark import namespaces, strategies_table
from tools.benchmark.compute import variables
from tools.benchmark.namespaces import Cluster, ended, events, going_on
from tools.benchmark.restart import rank_pid
from tools.benchmark.strategies_table import Faulty, Point, Training, faults_table, picture
from tools.command_line import ROOT, paddle_dp, parser_of, tell

LINKS = ("loopback", "1 Gbit/s", "100 Mbit/s")
SLOW = "50 ms"  # of the slow rank, each step
PATIENCE = 90.0  # seconds for one training


@dataclass(frozen=True)
class Task:
    """A recipe, its overrides, and the held-out loss that a training is to reach."""

    name: str
    recipe: str
    words: tuple[str, ...]
    every: int  # steps from one evaluation to the next
    target: float


TASKS = [
    Task("digits", "configs/digits_convnet.yaml", ("train.length=230 steps",), 23, 0.60),
    Task("gpt", "configs/gpt_data2.yaml", ("train.length=40 steps", "dataset.held_out=0.03"), 5, 2.80),
]


@dataclass(frozen=True)
class Way:
    """What the tables call it, its strategy, where `{n}` is the number of workers, and further overrides. `alone`: it
    is one process."""

    name: str
    strategy: str
    words: tuple[str, ...] = ()
    alone: bool = False
    servers: int = 0  # the first ranks, which serve and do not learn
    tasks: tuple[str, ...] = ("digits", "gpt")

    def ranks(self, workers: int) -> int:
        return 1 if self.alone else workers + self.servers

    def of(self, workers: int) -> Way:
        """With the number of workers in its place."""
        return replace(self, strategy=self.strategy.replace("{n}", str(workers)))


WAYS = [
    Way("one process", "use: single", alone=True),
    Way("data_parallel", "use: data_parallel"),
    *(
        Way(f"data_parallel, {exchange}", f"use: data_parallel, exchange: {exchange}")
        for exchange in ("bucketed", "after", "per_parameter")
    ),
    *(
        Way(f"data_parallel, {compress}", f"use: data_parallel, compress: {compress}")
        for compress in ("bfloat16", "float16", "power_sgd rank 4")
    ),
    *(
        Way(f"sharding, stage {stage}", f"use: hybrid, sharding: {{n}}, sharding_stage: {stage}")
        for stage in (1, 2, 3)
    ),
    Way("data_parallel, scatter", "use: data_parallel", ("dataset.reading=scatter",)),
    Way("tensor", "use: hybrid, tensor: {n}", tasks=("gpt",)),
    Way("sequence", "use: hybrid, sequence: {n}", tasks=("gpt",)),
    Way("pipeline", "use: hybrid, pipeline: {n}", ("train.micro_batches=4",)),
    Way("local_sgd, every 8 steps", "use: local_sgd, every: 8 steps"),
    Way("DiLoCo, every 24 steps", "use: local_sgd, every: 24 steps, outer: {}"),
    Way("async_average", "use: async_average"),
    Way("1 parameter server", "use: parameter_server, servers: 1", servers=1),
    Way("2 parameter servers", "use: parameter_server, servers: 2", servers=2),
    Way("2 parameter servers, async", "use: parameter_server, servers: 2, mode: async", servers=2),
    Way("replicas", "use: replicas, count: {n}", alone=True),
]


def main() -> int:
    given = arguments()
    if given.table:
        found = [one for file in given.table for one in strategies_table.read(csv.DictReader(file.open()))]
        show(found, given.png)
        return 0
    if given.page:
        seconds, target = strategies_table.read_page(given.page.read_text(), PANEL)
        picture(seconds, TITLE.format(target, *PANEL), given.png)
        return 0
    if reason := namespaces.why_not():
        print(reason, file=sys.stderr)
        return 2
    namespaces.end_on_sigterm()
    failed: list[str] = []
    ways = [way for way in WAYS if not given.only or way.name in given.only]
    with (
        namespaces.cluster(max(given.workers) + 2) as box,
        tempfile.TemporaryDirectory(prefix="strategies-") as folder,
    ):
        bench = Bench(box, Path(folder))
        if given.faults:
            rows = []
            for way in (way for way in ways if TASKS[0].name in way.tasks and not way.alone):
                with going_on(way.name, failed):
                    rows.append(bench.faults(way))
                    tell(faults_table(rows[-1:]).splitlines()[-1])
            print(faults_table(rows))
            return 1 if failed else 0
        found = []
        for task, workers, link, way in combinations(given.tasks, given.workers, given.links, ways):
            with going_on(f"{way.name} of {workers} over {link}", failed):
                found.append(bench.training(way, task, link, workers))
                tell(found[-1])
            if given.csv and found:
                write(found, given.csv)
    show(found, given.png)
    return 1 if failed else 0


def combinations(
    tasks: Sequence[str], workers: Sequence[int], links: Sequence[str], ways: Sequence[Way]
) -> Iterator[tuple[Task, int, str, Way]]:
    """What is measured, in order. What is one process knows no link: it is measured over the first alone; and what does
    not know the number of workers either, with the first alone."""
    for task in (task for task in TASKS if task.name in tasks):
        for number, link, way in itertools.product(workers, links, ways):
            first = link == links[0] and (number == workers[0] or "{n}" in way.strategy)
            if task.name in way.tasks and (first or not way.alone):
                yield task, number, link, way.of(number)


def arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    names = [task.name for task in TASKS]
    parser.add_argument("--tasks", nargs="+", default=names, choices=names, metavar="TASK")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], choices=range(2, 7), metavar="N")
    parser.add_argument("--links", nargs="+", default=LINKS, metavar="SPEED")
    parser.add_argument("--only", nargs="+", default=[], metavar="WAY", help="their names, as in the table")
    parser.add_argument("--faults", action="store_true", help="one slow rank, and one dead rank, instead")
    parser.add_argument("--csv", type=Path, metavar="FILE")
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--page", type=Path, metavar="MD", help="measure nothing, draw the page's table")
    parser.add_argument("--table", type=Path, nargs="+", metavar="CSV", help="measure nothing, show these")
    given = parser.parse_args()
    if given.page and not given.png:
        parser.error("--page needs --png: it draws the table of that page")
    for link in given.links:
        if link != "loopback":
            LinkSpeed.parse(link)
    return given


PANEL = ("gpt", 2, "100 Mbit/s")  # task, workers and link of the picture: where ways differ most
TITLE = "Seconds until the held-out loss is {:g}: {}, {} workers, {}"


def show(found: Sequence[Training], png: Path | None) -> None:
    targets = {task.name: task.target for task in TASKS}
    print(strategies_table.tables(found, targets))
    panel = [training for training in found if (training.task, training.workers, training.link) == PANEL]
    if png and panel:
        target = targets[PANEL[0]]
        picture(strategies_table.seconds_to_target(panel, target), TITLE.format(target, *PANEL), png)


def write(found: Sequence[Training], file: Path) -> None:
    with file.open("w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(Training.COLUMNS)
        writer.writerows(row for training in found for row in training.rows())


class Followed:
    """What a training's events say, and what its nodes have sent at each; without its evaluations.

    The first `servers` nodes only serve; through a node's interface `ranks` ranks send.
    """

    def __init__(self, servers: int, ranks: int):
        self.points: list[Point] = []
        self.rates: list[float] = []
        self.accuracy = 0.0
        self._servers, self._ranks = servers, ranks
        self._left = 0.0, list[int]()  # seconds, and bytes by node, that do not count
        self._now = 0.0, list[int]()

    def event(self, event: dict[str, Any], sent: list[int]) -> None:
        if event["event"] == "start":
            self._left = 0.0, sent
        elif event["event"] == "step":
            self.rates.append(event["samples_per_second"])
            self._now = event["seconds"], sent
        elif event["event"] == "evaluated":
            (before, so_far), (seconds, left) = self._now, self._left
            per_rank = [
                (count - least) / self._ranks / 1e6 for count, least in zip(so_far, left, strict=True)
            ]
            self.accuracy = event.get("acc1", 0.0)
            point = Point(
                step=event["step"], seconds=before - seconds, loss=event["loss"],
                mb=statistics.mean(per_rank[self._servers :] or per_rank), busiest_mb=max(per_rank),
            )  # fmt: skip
            self.points.append(point)
            gone = [count + now - then for count, now, then in zip(left, sent, so_far, strict=True)]
            self._left = seconds + event["seconds"] - before, gone


class Bench:
    """Jobs on one cluster, one after another."""

    def __init__(self, box: Cluster, folder: Path):
        self.box, self.folder, self._port = box, folder, 9800

    def training(self, way: Way, task: Task, link: str, workers: int) -> Training:
        """One whole training."""
        ranks = way.ranks(workers)
        alone = link == "loopback" or ranks == 1
        if not alone:
            self.box.limit(LinkSpeed.parse(link))
        device = "lo" if alone else self.box.interface
        callbacks = (f"{{use: {use}, every: {task.every} steps}}" for use in ("metrics", "evaluate"))
        words = [*task.words, f"callbacks=[{', '.join(callbacks)}]"]
        processes, logs, metrics = self.start(way, ranks, task, words, alone)
        follows = Followed(way.servers, ranks if alone else 1)
        try:
            for event in events(metrics, processes, PATIENCE):
                follows.event(event, [self.box.sent(process, device) for process in processes])
            namespaces.check(processes, logs)
        except TimeoutError:
            if not follows.points:
                raise
        finally:
            namespaces.end(processes)
        return Training(
            way=way.name, task=task.name, workers=workers, link=link, points=follows.points, accuracy=follows.accuracy,
            samples_per_second=statistics.median(follows.rates[1:] or follows.rates),
        )  # fmt: skip

    def start(
        self, way: Way, ranks: int, task: Task, words: Sequence[str], alone: bool
    ) -> tuple[list[subprocess.Popen[bytes]], list[Path], Path]:
        """The processes of a job, one for each node that it has, their logs, and its metrics."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        self._port += 1
        nodes = 1 if alone else ranks
        commands, logs = [], [self.folder / f"out-{node}" for node in range(nodes)]
        for node in range(nodes):
            options = ["--ranks", ranks if alone else 1, "--out", folder / f"run-{node}"]
            overrides = [f"strategy={{{way.strategy}}}", *words, *way.words]
            command = paddle_dp("train", ROOT / task.recipe, *options, *overrides)
            if not alone:
                command += ["--nodes", str(nodes), "--node-rank", str(node)]
                command += ["--master", f"{self.box.address(0)}:{self._port}"]
            commands.append(command)
        processes = self.box.start_all(commands, logs, {**variables(), "PYTHONPATH": str(ROOT)})
        return processes, logs, folder / "run-0" / "metrics.jsonl"

    # A slow rank, and a dead one

    def faults(self, way: Way) -> Faulty:
        """Four workers on one node: as they are, with one that is slow, and with one that is killed."""
        task, way = TASKS[0], way.of(4)
        plain, slowed = (self.pace(way, task, delay) for delay in ("0 ms", SLOW))
        return Faulty(way=way.name, plain=plain, slowed=slowed, killed=self.killed(way, task))

    def pace(self, way: Way, task: Task, delay: str) -> float:
        """Samples a second, of all ranks, where the last one sleeps so long in each step: a worker everywhere, and of
        a pipeline the one that has the loss."""
        slow = f"rank: {way.ranks(4) - 1}, delay: {delay}"
        loss = f"loss={{use: tools.benchmark.delayed.DelayedCrossEntropy, label_smoothing: 0.1, {slow}}}"
        words = [*task.words, loss, "callbacks=[{use: metrics, every: 23 steps}]"]
        processes, logs, metrics = self.start(way, way.ranks(4), task, words, alone=True)
        with ended(processes, logs):
            seen = list(events(metrics, processes, PATIENCE))
        rates = [event["samples_per_second"] for event in seen if event["event"] == "step"]
        return statistics.median(rates[1:])

    def killed(self, way: Way, task: Task) -> str:
        """What a job says whose second worker is killed in mid-training, and after how many seconds."""
        victim = way.servers + 1
        words = [*task.words, "callbacks=[{use: metrics, every: 5 steps}]"]
        processes, logs, metrics = self.start(way, way.ranks(4), task, words, alone=True)
        killed_at = 0.0
        try:
            for event in events(metrics, processes, PATIENCE):
                if event["event"] == "step" and event["step"] >= 40 and not killed_at:
                    os.kill(rank_pid(metrics.parent, victim), signal.SIGKILL)
                    killed_at = time.monotonic()
            took = time.monotonic() - killed_at
        finally:
            namespaces.end(processes)
        said = logs[0].read_text(errors="replace").splitlines()
        status = processes[0].returncode
        first = next((line.strip() for line in said if f"rank {victim}" in line), "nothing")
        return f"{f'ends in {took:.1f} s, status {status}' if status else 'goes on to the end'}: {first}"


if __name__ == "__main__":
    sys.exit(main())
