"""The places where foretold.py trains: network namespaces, and the simulated accelerator."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from paddle_dp.plan.bound import Compute
from paddle_dp.units import LinkSpeed
from tools.benchmark.compute import command, mean_compute, printed, quick
from tools.benchmark.forecast import Forecast
from tools.benchmark.foretold_table import Row
from tools.benchmark.link_events import Cost, Kind, Link
from tools.benchmark.namespaces import BURST_BYTES, Cluster
from tools.benchmark.overlap import device_variables, job_windows
from tools.benchmark.step_events import step_seconds
from tools.benchmark.wire import Bench

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPES = {
    "namespaces": {"gpt": HERE / "gpt_wire.yaml", "mlp": HERE / "mlp_25mb.yaml"},
    "device": {"gpt": HERE / "gpt_sim.yaml", "mlp": HERE / "mlp_sim.yaml"},
}
UNLIMITED = LinkSpeed.parse("20 Gbit/s")  # what the kernel carries from node to node is less
LATENCY = 1e-4  # seconds of a simulated link's message
CUT_JOBS, CUT_STEPS = 2, 12  # that measure what a rank with cut layers computes
MICRO_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout of a model: its name, and the overrides that make it."""

    model: str
    ranks: int
    name: str
    words: tuple[str, ...]


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
        return forecast.compute(
            self.compute(self.recipe(choice.model), self.share_of_batch(forecast, choice.ranks), choice.ranks)
        )

    def share_of_batch(self, forecast: Forecast, parts: int) -> list[str]:
        """The overrides of a job that trains 1/parts of the batch in as many passes through a layer."""
        passes = max(1, MICRO_BATCHES // forecast.layout.degrees.pipeline)
        return [f"train.batch={forecast.batch // parts}", f"train.micro_batches={passes}"]

    def cut_only(self, forecast: Forecast, parts: int) -> list[str]:
        """The overrides of a job that cuts layers as the layout does, and nothing else, on 1/parts of the batch."""
        layout = forecast.layout
        parallel = str(layout.sequence_parallel).lower()
        cut = f"strategy={{use: hybrid, tensor: {layout.degrees.tensor}, sequence_parallel: {parallel}}}"
        return [*self.share_of_batch(forecast, parts), cut]

    def compute(self, recipe: Path, words: list[str], ranks: int) -> Compute:
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

    def compute(self, recipe: Path, words: list[str], ranks: int) -> Compute:
        return mean_compute(self.bench.on_all(command(recipe, words)))

    def rank_compute(self, choice: Choice, forecast: Forecast) -> Compute:
        """Cut layers do more than their share: norms are not cut, and cutting adds operations. They are measured in
        jobs that cut layers and nothing else, one on each group of nodes at once, where the link has no limit, without
        the exchanges and what they wait for."""
        degrees = forecast.layout.degrees
        if degrees.tensor == 1:
            return super().rank_compute(choice, forecast)
        groups = self.bench.box.groups(degrees.tensor)
        words = [*self.cut_only(forecast, len(groups)), "train.device=cpu"]
        with ThreadPoolExecutor(len(groups)) as pool:
            rounds = [
                list(pool.map(lambda box: self._phases(box, self.recipe(choice.model), words), groups))
                for _ in range(CUT_JOBS)
            ]
        means = [
            {phase: statistics.mean(each[phase] for each in phases) for phase in phases[0]}
            for phases in rounds
        ]
        least = min(means, key=lambda phases: sum(phases.values()))
        return Compute(**{**least, "update": least["update"] / (degrees.pipeline * degrees.sharding)})

    def _phases(self, box: Cluster, recipe: Path, words: list[str]) -> dict[str, float]:
        """Seconds by phase of a job on these nodes, the mean of their ranks."""
        folder = Path(tempfile.mkdtemp(dir=self.bench.folder))
        bench = Bench(box, folder, [UNLIMITED], CUT_STEPS, self.flops)
        bench.job(recipe, words)
        events = map(json.loads, bench.latest.read_text().splitlines())
        ranks = [rank for event in events if event["event"] == "measured" for rank in event["ranks"]]
        return {
            phase: statistics.mean(rank[phase] for rank in ranks)
            for phase in ("forward", "backward", "update")
        }

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
        self.variables = device_variables(flops)
        self._steps, self._costs = steps, dict[int, dict[Kind, list[Cost]]]()

    def compute(self, recipe: Path, words: list[str], ranks: int) -> Compute:
        """The mean of as many processes at once: they share this machine's processors, as ranks do."""
        with ThreadPoolExecutor(ranks) as pool:
            return mean_compute([*pool.map(lambda _: printed(recipe, words, self.variables), range(ranks))])

    def rank_compute(self, choice: Choice, forecast: Forecast) -> Compute:
        """Cut layers are measured as in namespaces: their steps over a link without limit, less their exchanges."""
        alone, degrees = super().rank_compute(choice, forecast), forecast.layout.degrees
        if degrees.tensor == 1:
            return alone
        groups, recipe = choice.ranks // degrees.tensor, self.recipe(choice.model)
        words = self.cut_only(forecast, groups)
        with ThreadPoolExecutor(groups) as pool:
            steps = pool.map(lambda _: self._step(recipe, degrees.tensor, words, None), range(groups))
            measured = statistics.mean(steps)
        rest = Compute(forward=0.0, backward=0.0, update=alone.update * degrees.pipeline * degrees.sharding)
        free = replace(self.link(UNLIMITED, choice.ranks), rate=inf)
        computed = measured - foretold(Forecast.of(recipe, words, degrees.tensor), rest, free)
        longer = computed / (alone.forward + alone.backward)
        return replace(alone, forward=longer * alone.forward, backward=longer * alone.backward)

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
        return [
            self._step(self.recipe(choice.model), choice.ranks, choice.words, speed) for speed in self.links
        ]

    def _step(self, recipe: Path, ranks: int, words: Sequence[str], speed: LinkSpeed | None) -> float:
        """Seconds of a step over a link of this speed, or without a limit."""
        rate = speed.bytes_per_second if speed is not None else 0.0
        slow = {"SIM_BANDWIDTH": f"{rate:.0f}", "SIM_LATENCY": str(LATENCY)}
        return quick(job_windows(ranks, words, self._steps, {**self.variables, **slow}, recipe))


def read_costs(file: Path) -> dict[Kind, list[Cost]]:
    return {
        kind: [
            Cost(ranks=int(ranks), pause=pause, start=start, byte=byte) for ranks, pause, start, byte in costs
        ]
        for kind, costs in json.loads(file.read_text()).items()
    }
