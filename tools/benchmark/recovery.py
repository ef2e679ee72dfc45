"""Measures what failures cost: one model, one schedule of kills, and several systems that go on after them.

    python tools/benchmark/recovery.py                                    # paddle_dp alone
    python tools/benchmark/recovery.py --torch ~/torch/bin/python          # torchrun, and torchft if it is there, too
    python tools/benchmark/recovery.py --every "60 s,30 s,15 s" --kinds rank,supervisor,node --steps 4800
    python tools/benchmark/recovery.py --systems paddle_dp --ours "in memory=--ranks 2 --restarts 9 KEY=VALUE"

Two ranks train a perceptron of 85 thousand weights over gloo, from a file of samples. In a forward they sleep for each
sample, so that a step takes --step: the time of an accelerator, which needs no core. Every system saves a checkpoint
each --save-every; torchft takes the weights of a living replica. A process is ended by SIGKILL each --every of
training, by the same draws for all systems, until 85 % of the updates are done. That time counts from the first update,
and anew from the first one after a kill: a system that takes long to go on is not spared kills by that.

rank        one of the ranks
supervisor  `paddle-dp` or torchrun, and after half a second what is left of its processes, as systemd does
node        all processes of a node at once

Supervisors and nodes are started again at once with the same command (`--resume` for paddle_dp on one node), as an
engine does. torchft's replicas are a node each; one node has both ranks else.

goodput: the samples that count in the end, times the seconds that the system's own undisturbed step takes for a sample,
over the seconds from the first update to the last. "by updates" counts an update as one although a replica was missing.
A sample is lost if the undisturbed run learned from it in that epoch and this run did not; twice, the other way round.
Weights at the end are compared with those of an undisturbed run of the same system, which does not sleep.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from paddle_dp.launch.network import free_port
from paddle_dp.launch.processes import alive, descendants, kill_all, send
from paddle_dp.units import Duration, EverySteps, Quantity
from tools.benchmark.recovery_table import (
    Kill,
    Line,
    Row,
    counting,
    distance,
    read_log,
    row,
    samples_by_step,
    table,
)

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("rank", "supervisor", "node")
RANKS, SAMPLES, WIDTH = 2, 1280, 256
GRACE = 0.5  # seconds after a supervisor's death in which its processes may end by themselves
LOOK = 0.05  # seconds between two looks at the processes
LAST_KILL = 0.85  # of the updates: after it nobody is killed
RECIPE = """\
name: recovery
model: {{use: tools.benchmark.recovery_parts.Perceptron, width: {width}, sample_ms: {sample_ms}}}
dataset: {{use: tools.benchmark.recovery_parts.Samples, path: {data}}}
loss: {{use: cross_entropy}}
optimizer: {{use: adamw, weight_decay: 0.01}}
schedule: {{use: constant, learning_rate: 1e-3}}
strategy: {{use: data_parallel}}
train: {{length: {steps} steps, batch: {batch}, seed: 0}}
callbacks:
  - {{use: console, every: 200 steps}}
  - {{use: metrics, every: 10 steps}}
  - {{use: checkpoint, every: {save_every} steps, keep: 2}}
  - {{use: tools.benchmark.recovery_parts.StepLog, folder: {log}}}
"""


@dataclass(frozen=True)
class System:
    """A row of the table. `family`: paddle_dp, torchrun or torchft; `options` of `paddle-dp train`."""

    name: str
    family: str
    options: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        return RANKS if self.family == "torchft" else 1


SYSTEMS = [
    System("paddle_dp", "paddle_dp", ("--ranks", "2", "--restarts", "9")),
    System("paddle_dp, spares", "paddle_dp", ("--ranks", "2", "--restarts", "9", "--spares")),
    System("paddle_dp, elastic", "paddle_dp", ("--ranks", "1:2", "--restarts", "9")),
    System("torchrun", "torchrun"),
    System("torchft", "torchft"),
]
REFERENCES = {
    "paddle_dp": System("paddle_dp", "paddle_dp", ("--ranks", "2")),
    "torchrun": System("torchrun", "torchrun"),
    "torchft": System("torchft", "torchft"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`step`: seconds; `every`: seconds between kills, 0 for none."""

    torch: str
    data: Path
    steps: int
    batch: int
    step: float
    save_every: int
    kinds: Sequence[str]
    seed: int

    @property
    def sample_ms(self) -> float:
        return 1000 * self.step * RANKS / self.batch


@dataclass
class Training:
    """One training of a system, in `folder`; its nodes' processes run until they are done."""

    system: System
    settings: Settings
    folder: Path
    sleeps: bool
    port: int = 0  # of torchft's lighthouse
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    def run(self, every: float, patience: float) -> list[Line]:
        """The log of the training with a kill each `every` seconds. Raises RuntimeError if it fails, or takes longer
        than `patience` seconds."""
        draws, deadline, due = random.Random(self.settings.seed), time.monotonic() + patience, 0.0
        with self._started():
            while any(node.poll() is None for node in self.nodes):
                time.sleep(LOOK)
                self._check(deadline)
                if not every or time.time() < due:
                    continue
                log = [line for line in read_log(self.folder / "log") if "step" in line]
                if not due:
                    due = self._next_kill(log, every)
                elif max(line["step"] for line in log) < LAST_KILL * self.settings.steps:
                    self._kill(draws, log)
                    due = 0.0
                else:
                    every = 0.0
            self._check(deadline)
        return read_log(self.folder / "log")

    def _next_kill(self, log: Sequence[Line], every: float) -> float:
        """The time of the next kill; 0 as long as there is no update after the last one, or of all ranks at first."""
        if self.kills:
            last = self.kills[-1]
            log = [line for line in log if line["began"] >= last.time and line["pid"] not in last.ended]
        elif {line["rank"] for line in log} != set(range(RANKS)):
            return 0.0
        return min(line["time"] for line in log) + every if log else 0.0

    @contextmanager
    def _started(self) -> Iterator[None]:
        (self.folder / "log").mkdir(parents=True)
        lighthouse: list[subprocess.Popen[bytes]] = []
        try:
            if self.system.family == "torchft":
                self.port = free_port(29510)
                lighthouse.append(self._process(self._lighthouse(), {}, "lighthouse"))
            self.nodes = [self._start(node, again=False) for node in range(self.system.nodes)]
            yield
        finally:
            for process in [*self.nodes, *lighthouse]:
                _end(process)

    def _check(self, deadline: float) -> None:
        for number, node in enumerate(self.nodes):
            if node.poll():
                raise RuntimeError(f"{self.system.name}: status {node.returncode}\n{self._tail(number)}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{self.system.name} does not come to its end\n{self._tail(0)}")

    def _tail(self, node: int) -> str:
        return (self.folder / f"node-{node}.log").read_text(errors="replace")[-3000:]

    def _kill(self, draws: random.Random, log: Sequence[Line]) -> None:
        kind = self.settings.kinds[len(self.kills) % len(self.settings.kinds)]
        drawn = draws.random()
        number = int(drawn * self.system.nodes)
        node = self.nodes[number]
        family = [node.pid, *descendants(node.pid)]
        if kind == "rank":
            newest = {line["rank"]: line["pid"] for line in log}
            living = [pid for _, pid in sorted(newest.items()) if alive(pid)]
            if not living:
                return  # between an update and this look all have ended
            family = [living[int(drawn * len(living))]]
        self.kills.append(Kill(time=time.time(), kind=kind, ended=frozenset(family)))
        if kind == "supervisor":
            send([node.pid], signal.SIGKILL)
            node.wait()
            time.sleep(GRACE)
        kill_all(lambda: [pid for pid in family if alive(pid)])
        if kind != "rank":
            node.wait()
            self.nodes[number] = self._start(number, again=True)

    def _start(self, node: int, again: bool) -> subprocess.Popen[bytes]:
        make = {"paddle_dp": self._ours, "torchrun": self._torchrun, "torchft": self._torchft}
        command, variables = make[self.system.family](node, again)
        return self._process(command, variables, f"node-{node}")

    def _process(
        self, command: Sequence[str], variables: Mapping[str, str], name: str
    ) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables
        }  # fmt: skip
        with (self.folder / f"{name}.log").open("ab") as screen:
            return subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=screen,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _ours(self, node: int, again: bool) -> tuple[list[str], dict[str, str]]:
        settings, recipe = self.settings, self.folder / "recovery.yaml"
        recipe.write_text(
            RECIPE.format(
                width=WIDTH, sample_ms=settings.sample_ms * self.sleeps, data=settings.data, steps=settings.steps,
                batch=settings.batch, log=self.folder / "log", save_every=settings.save_every,
            )
        )  # fmt: skip
        command = [sys.executable, "-m", "paddle_dp", "train", str(recipe), *self.system.options]
        return [*command, "--output-dir", str(self.folder / "run"), *["--resume"] * again], {}

    def _script(self) -> list[str]:
        settings = self.settings
        return [
            str(ROOT / "tools/benchmark/recovery_torch.py"), "--data", str(settings.data),
            "--folder", str(self.folder / "log"), "--steps", str(settings.steps), "--batch", str(settings.batch),
            "--width", str(WIDTH), "--sample-ms", str(settings.sample_ms * self.sleeps),
            "--save-every", str(settings.save_every),
        ]  # fmt: skip

    def _torchrun(self, node: int, again: bool) -> tuple[list[str], dict[str, str]]:
        return self._launched("--standalone", "--nproc-per-node", str(RANKS)), {}

    def _torchft(self, node: int, again: bool) -> tuple[list[str], dict[str, str]]:
        variables = {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}", "REPLICA_GROUP_ID": str(node),
            "NUM_REPLICA_GROUPS": str(RANKS),
        }  # fmt: skip
        master = ["--master-addr", "127.0.0.1", "--master-port", str(free_port(self.port + 1 + 100 * node))]
        return [*self._launched("--nnodes", "1", "--nproc-per-node", "1", *master), "--torchft"], variables

    def _launched(self, *options: str) -> list[str]:
        """The script under torchrun."""
        launcher = [self.settings.torch, "-m", "torch.distributed.run", "--max-restarts", "1000"]
        return [*launcher, *options, *self._script()]

    def _lighthouse(self) -> list[str]:
        """The words of torchft's own example."""
        program = Path(self.settings.torch).parent / "torchft_lighthouse"
        return [
            str(program), "--bind", f"127.0.0.1:{self.port}", "--min_replicas", "1", "--quorum_tick_ms", "100",
            "--join_timeout_ms", "10000",
        ]  # fmt: skip


def _end(process: subprocess.Popen[bytes]) -> None:
    family = [process.pid, *descendants(process.pid)]
    if process.poll() is None:
        kill_all(lambda: [pid for pid in family if alive(pid)])
    process.wait()


class Bench:
    """Trains each family undisturbed once, and each system under each schedule."""

    def __init__(self, settings: Settings, folder: Path):
        self.settings, self.folder = settings, folder
        self._references: dict[str, tuple[list[Line], dict[str, np.ndarray]]] = {}

    def measure(self, system: System, every: float) -> Row:
        log, weights = self._reference(system.family)
        folder = self.folder / f"{system.name}, {every:g} s".replace(" ", "_").replace(",", "")
        training = Training(system, self.settings, folder, sleeps=True)
        patience = 300 + 20 * self.settings.steps * self.settings.step  # a busy machine starts ranks slowly
        disturbed = training.run(every, patience)
        return row(
            system.name, every, disturbed, training.kills, samples_by_step(counting(log)),
            SAMPLES // self.settings.batch, distance(_weights(folder), weights),
        )  # fmt: skip

    def _reference(self, family: str) -> tuple[list[Line], dict[str, np.ndarray]]:
        if family not in self._references:
            folder = self.folder / f"{family}-undisturbed"
            log = Training(REFERENCES[family], self.settings, folder, sleeps=False).run(0.0, 600.0)
            self._references[family] = log, _weights(folder)
        return self._references[family]


def _weights(folder: Path) -> dict[str, np.ndarray]:
    with np.load(folder / "log" / "weights.npz") as arrays:
        return dict(arrays)


def write_samples(path: Path) -> None:
    """Ten clouds of points; the last of a sample's 65 numbers is its index."""
    draws = np.random.default_rng(0)
    targets = draws.integers(0, 10, SAMPLES)
    points = draws.normal(size=(10, 64))[targets] + draws.normal(scale=2.0, size=(SAMPLES, 64))
    inputs = np.concatenate([points, np.arange(SAMPLES)[:, None]], axis=1)
    np.savez(path, inputs=inputs.astype("float32"), targets=targets.astype("int64"))


def why_not(system: System, torch: str) -> str | None:
    """Why a system cannot be measured, as a sentence; None if it can."""
    modules = {"paddle_dp": "paddle", "torchrun": "torch", "torchft": "torch, torchft"}[system.family]
    python = sys.executable if system.family == "paddle_dp" else torch
    done = subprocess.run(
        [python, "-c", f"import {modules}"], capture_output=True, text=True, check=False, cwd="/"
    )
    return f"{python} cannot import {modules}: {done.stderr.splitlines()[-1]}" if done.returncode else None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="All of it: see this file's beginning."
    )
    seconds = partial(_parsed, Duration)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="one that can import torch")
    parser.add_argument("--systems", help="names of rows, separated by ';'")
    parser.add_argument(
        "--ours", action="append", default=[], metavar="NAME=OPTIONS", help="another row: of paddle-dp train"
    )
    parser.add_argument("--every", default="30 s", help="seconds between kills, several separated by commas")
    parser.add_argument("--kinds", default="rank", help=f"in turn: {','.join(KINDS)}")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--step", type=seconds, default="40 ms")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--save-every", type=partial(_parsed, EverySteps), default="20 steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of logs and runs, not to be removed")
    settings = parser.parse_args()
    unknown = set(settings.kinds.split(",")) - set(KINDS)
    if unknown or SAMPLES % settings.batch or settings.batch % RANKS:
        parser.error(
            f"--kinds are {', '.join(KINDS)}, and --batch divides {SAMPLES} and is a multiple of {RANKS}"
        )
    return settings


def _parsed(quantity: type[Quantity], text: str) -> Quantity:
    try:
        parsed: Quantity = quantity.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return parsed


def chosen_systems(given: argparse.Namespace) -> list[System]:
    """The rows that were asked for. Raises SystemExit for an unknown name."""
    added = [entry.partition("=") for entry in given.ours]
    ours = [System(name, "paddle_dp", tuple(shlex.split(options))) for name, _, options in added]
    names = [system.name for system in SYSTEMS] if given.systems is None else given.systems.split(";")
    if unknown := set(names) - {"", *(system.name for system in SYSTEMS)}:
        raise SystemExit(f"--systems: {unknown.pop()!r} is none of {'; '.join(s.name for s in SYSTEMS)}")
    return [*(system for system in SYSTEMS if system.name in names), *ours]


def main() -> int:
    given = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through every `finally`
    folder = given.keep or Path(tempfile.mkdtemp(prefix="recovery-"))
    folder.mkdir(parents=True, exist_ok=True)
    write_samples(folder / "samples.npz")
    settings = Settings(
        torch=given.torch, data=folder.resolve() / "samples.npz", steps=given.steps, batch=given.batch,
        step=given.step.seconds, save_every=round(given.save_every.count), kinds=given.kinds.split(","),
        seed=given.seed,
    )  # fmt: skip
    bench, rows = Bench(settings, folder.resolve()), []
    try:
        for system in chosen_systems(given):
            if reason := why_not(system, given.torch):
                print(f"{system.name} is left out: {reason}", file=sys.stderr, flush=True)
                continue
            for every in given.every.split(","):
                try:
                    rows.append(bench.measure(system, Duration.parse(every).seconds))
                    line = f"{' | '.join(rows[-1].cells())} (load {os.getloadavg()[0]:.1f})"
                except RuntimeError as error:  # the other rows are worth knowing
                    line = f"{system.name}, {every}: {error}"
                print(line, file=sys.stderr, flush=True)
    finally:
        if not given.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
