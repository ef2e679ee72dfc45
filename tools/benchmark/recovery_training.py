"""A training of recovery.py: a system's processes, and the kills that they meet."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from paddle_dp.launch.network import free_port
from paddle_dp.launch.processes import alive, descendants, kill_all, send
from tools.benchmark.recovery_table import Kill, Line, read_log
from tools.benchmark.restart import lose

ROOT = Path(__file__).resolve().parents[2]
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
                lose(process)

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
        words = {
            "data": str(settings.data), "folder": str(self.folder / "log"), "steps": settings.steps,
            "batch": settings.batch, "width": WIDTH, "sample_ms": settings.sample_ms * self.sleeps,
            "save_every": settings.save_every, "torchft": self.system.family == "torchft",
        }  # fmt: skip
        return [str(ROOT / "tools/benchmark/recovery_torch.py"), json.dumps(words)]

    def _torchrun(self, node: int, again: bool) -> tuple[list[str], dict[str, str]]:
        return self._launched("--standalone", "--nproc-per-node", str(RANKS)), {}

    def _torchft(self, node: int, again: bool) -> tuple[list[str], dict[str, str]]:
        variables = {
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}", "REPLICA_GROUP_ID": str(node),
            "NUM_REPLICA_GROUPS": str(RANKS),
        }  # fmt: skip
        master = ["--master-addr", "127.0.0.1", "--master-port", str(free_port(self.port + 1 + 100 * node))]
        return self._launched("--nnodes", "1", "--nproc-per-node", "1", *master), variables

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
