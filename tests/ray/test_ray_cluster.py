"""A Ray cluster of two nodes on this machine: one job learns one process's numbers, and a killed actor is replaced.

`pytest -m ray`, after `pip install 'paddle_dp[ray]'`. Ray's processes talk to this machine alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from tests.eventually import eventually
from tests.faults.slow_run import are_right, losses, newest, right_weights
from tests.house.programs import ROOT, run_python

RECIPE = "tests/faults/slow.yaml"
pytestmark = [
    pytest.mark.long, pytest.mark.ray, pytest.mark.processes, pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="no Ray here: pip install 'paddle_dp[ray]'"),
]  # fmt: skip
# Starts two nodes, runs a job as its words say, and prints its result; all in one process, so that nothing is left.
DRIVER = """
import json, os, sys, time
import ray
from ray.cluster_utils import Cluster
from paddle_dp.ray import RayJob

recipe, out, settings, variables = json.loads(sys.argv[1])
cluster = Cluster()
try:
    for _ in range(2):
        cluster.add_node(num_cpus=1, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=True)
    print("UP", flush=True)
    began = time.time()
    result = RayJob(recipe=recipe, settings=settings, nodes=2, output_dir=out, spread=True, variables=variables).run()
    print("RESULT", json.dumps([result.status, result.cause, list(result.replaced), began]), flush=True)
finally:
    ray.shutdown()
    cluster.shutdown()
"""


class Job:
    """A driver in a process: its cluster and a job on it."""

    def __init__(self, out: Path, slow: str, *settings: str):
        self.out, self.log = out, out.with_suffix(".log")
        words = json.dumps([RECIPE, str(out), settings, {"SLOW": slow}])
        variables = {
            **os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "RAY_DEDUP_LOGS": "0",
            "RAY_raylet_start_wait_time_s": "200", "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, words],
                cwd=ROOT,
                env=variables,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def result(self) -> tuple[int, str, list[int], float]:
        self.process.wait(500)
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("RESULT ")]
        assert lines, self.log.read_text()
        status, cause, replaced, began = json.loads(lines[-1].removeprefix("RESULT "))
        return status, cause, replaced, began

    def actors(self) -> dict[int, int]:
        """The process of the actor of each node."""
        return {node: actor for node, (actor, _) in self.processes().items()}

    def processes(self) -> dict[int, tuple[int, int]]:
        """The process of the actor of each node, and that of its `paddle-dp`."""
        processes = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().decode().split("\0")
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                name = Path(f"/proc/{parent}/cmdline").read_bytes()
            except (OSError, ValueError):
                continue
            if "--node-rank" in words and str(self.out) in words and b"RayNode" in name:
                processes[int(words[words.index("--node-rank") + 1])] = (parent, int(path.name))
        return processes

    def trainings(self) -> int:
        return sum(
            str(self.out).encode() in path.read_bytes()
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if path.parent.name not in (str(os.getpid()), str(self.process.pid)) and path.exists()
        )


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The weights of one machine's two ranks."""
    return right_weights(tmp_path_factory.mktemp("right"), 2)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGTERM)
            job.process.wait(100)


def test_two_nodes_are_one_job(right: dict[str, np.ndarray], tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path / "run", "0")
    jobs.append(job)
    status, cause, replaced, began = job.result()
    assert (status, cause, replaced) == (0, "", []), job.log.read_text()
    assert len(losses(job.out)) == 300 and are_right(job.out, right) == 0.0
    first = next(e for e in map(json.loads, (job.out / "metrics.jsonl").open()) if e["event"] == "step")
    print(f"from submit to first update: {first['time'] - began:.1f} s")
    eventually(lambda: not job.trainings(), 20)


def test_a_killed_process_starts_again_in_its_actor(
    right: dict[str, np.ndarray], tmp_path: Path, jobs: list[Job]
) -> None:
    job = Job(tmp_path / "run", "0.05")
    jobs.append(job)
    eventually(lambda: newest(job.out) >= 40 or job.process.poll() is not None, 400, pause=0.2)
    os.kill(job.processes()[1][1], signal.SIGKILL)
    status, cause, replaced, _ = job.result()
    screen = job.log.read_text()
    assert (status, cause, replaced) == (0, "", [1]), screen
    assert "node 1: its paddle-dp was killed by SIGKILL, and is started again (restart 1 of 3)" in screen
    assert are_right(job.out, right) == 0.0
    assert "Exception ignored" not in screen


@pytest.mark.parametrize("node", [1, 0])
def test_a_killed_actor_is_replaced(
    right: dict[str, np.ndarray], tmp_path: Path, jobs: list[Job], node: int
) -> None:
    job = Job(tmp_path / "run", "0.05")
    jobs.append(job)
    eventually(lambda: newest(job.out) >= 40 or job.process.poll() is not None, 400, pause=0.2)
    assert len(job.actors()) == 2, job.log.read_text()
    os.kill(job.actors()[node], signal.SIGKILL)
    killed = time.time()
    status, cause, replaced, _ = job.result()
    screen = job.log.read_text()
    assert (status, cause, replaced) == (0, "", [node]), screen
    assert f"node {node}: its actor was lost, and is started again" in screen
    assert "goes on from step" in screen
    assert are_right(job.out, right) == 0.0
    again = [e["time"] for e in map(json.loads, (job.out / "metrics.jsonl").open()) if e["event"] == "start"][
        -1
    ]
    print(f"from the kill to the restarted training: {again - killed:.1f} s")
    eventually(lambda: not job.trainings(), 20)


def test_a_failure_comes_back_with_its_cause(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path / "run", "0", "schedule.learning_rate=1e38")
    jobs.append(job)
    status, cause, _, _ = job.result()
    assert status == 1 and "NotFiniteError" in cause, job.log.read_text()


# Starts two nodes of one processor each, and a sweep on them.
SWEEP = """
import os, subprocess, sys
from ray.cluster_utils import Cluster

cluster = Cluster()
try:
    for _ in range(2):
        cluster.add_node(num_cpus=1, include_dashboard=False)
    words = [sys.executable, "-m", "paddle_dp", "sweep", *sys.argv[1:], "--ray"]
    status = subprocess.run(words, env={**os.environ, "RAY_ADDRESS": cluster.address}).returncode
finally:
    cluster.shutdown()
sys.exit(status)
"""


def test_a_sweep_on_two_machines_has_the_scores_of_one(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    recipe = tmp_path / "digits.yaml"
    recipe.write_text(
        "{model: {use: mlp, inputs: 64, hidden: [16], classes: 10}, dataset: {use: digits}, loss: {use: cross_entropy},"
        " optimizer: {use: adamw}, train: {length: 2 epochs, batch: 64}}"
    )
    words = [
        str(recipe),
        "schedule.learning_rate=[0.001, 0.003, 0.01, 0.03]",
        "--search",
        "random",
        "--prune",
        "none",
    ]
    words += ["--score", "acc1", "--jobs", "2", "--output-dir"]
    environment = {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
                   "RAY_raylet_start_wait_time_s": "200", "RAY_USAGE_STATS_ENABLED": "0"}  # fmt: skip
    trials = {}
    for name, command in (("here", ["-m", "paddle_dp", "sweep"]), ("ray", ["-c", SWEEP])):
        done = run_python(*command, *words, tmp_path / name, folder=tmp_path, env=environment, timeout=500)
        lines = [line for line in done.stderr.splitlines() if line.startswith("trial ")]
        trials[name] = sorted(line.rpartition(" (")[0] for line in lines if "acc1" in line)
        assert len(trials[name]) == 4, done.stdout + done.stderr
    assert trials["ray"] == trials["here"]
