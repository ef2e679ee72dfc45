"""Nodes that keep checkpoints in their memories, and copies in the next one's: what is left after one or two are lost.

The nodes share this machine and its loopback. Each has a folder of its own in place of /dev/shm, which goes with it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.checkpoint import checkpoints
from paddle_dp.launch.network import free_port
from paddle_dp.launch.processes import kill_all, marked
from tests.eventually import eventually
from tests.faults.conftest import MARK
from tests.faults.lost import different, train
from tests.faults.namespaces import ROOT, finish, kill_node
from tests.faults.slow_run import losses

pytestmark = pytest.mark.long
TENSOR = "tests/faults/slow_hybrid.yaml"  # 120 steps of two ranks, each with half of every layer
ZERO = [
    "strategy.tensor=1", "strategy.sharding=2", "strategy.sharding_stage=2", "optimizer.use=adamw",
    "schedule.learning_rate=0.01",
]  # fmt: skip
SAVES = ["callbacks.2.every=100 steps", "callbacks.3.use=memory_checkpoint", "callbacks.3.every=5 steps"]


class Nodes:
    """Nodes of one job, with one rank each."""

    def __init__(self, folder: Path, count: int, *overrides: str, **more: Any):
        self.folder, self.out, self.count, self.overrides = folder, folder / "run", count, overrides
        self.more = more  # fields of the Job
        self.master, self.mark = f"127.0.0.1:{free_port(61_400)}", f"memory-{os.getpid()}-{time.time_ns()}"
        self.processes = [self.begin(node) for node in range(count)]

    def memory(self, node: int) -> Path:
        return self.folder / f"memory-{node}"

    def begin(self, node: int) -> subprocess.Popen[str]:
        self.memory(node).mkdir(exist_ok=True)
        job = {
            "recipe": TENSOR, "entry_point": "train", "ranks": 1, "nodes": self.count, "master": self.master,
            "node_rank": node, "overrides": [*SAVES, *self.overrides], "output_dir": str(self.out), "restarts": 3,
            **self.more,
        }  # fmt: skip
        variables = {
            "OMP_NUM_THREADS": "1", "PADDLE_DP_SECRET": "hush", MARK: self.mark,
            "MEMORY_FOLDER": str(self.memory(node)),
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "tests/faults/start.py", json.dumps(job)], cwd=ROOT, env={**os.environ, **variables},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def at_step(self, step: int) -> None:
        def reached() -> bool:
            failed = [process.communicate()[1] for process in self.processes if process.poll() is not None]
            assert not failed, failed
            return (self.out / "metrics.jsonl").exists() and max(losses(self.out), default=0) >= step

        eventually(reached, 90, pause=0.1)

    def lose(self, node: int, wiped: bool = True) -> None:
        """A power cut: all of a node's processes and its memory are gone at once. `wiped=False`: its memory stays."""
        kill_node(self.processes[node])
        assert list(self.memory(node).iterdir()), "nothing was in memory"
        if wiped:
            shutil.rmtree(self.memory(node))

    def finish(self) -> list[str]:
        """The screens, when all nodes are done; nothing is left in their memories."""
        ended = finish(self.processes)
        assert {status for status, _, _ in ended} == {0}, ended
        assert not [*self.folder.glob("memory-*/*")]
        return [complained for _, _, complained in ended]

    def different(self, undisturbed: Path) -> int:
        return different(*(checkpoints(run / "checkpoints")[-1] for run in (self.out, undisturbed)))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    started: list[Nodes] = []

    def start(count: int, *overrides: str, **more: Any) -> Nodes:
        started.append(Nodes(tmp_path, count, *overrides, **more))
        return started[-1]

    yield start
    left = [pid for job in started for pid in marked(MARK, job.mark)]
    kill_all(lambda: [pid for job in started for pid in marked(MARK, job.mark)])
    assert not left, "processes were left behind"


def undisturbed(folder: Path, ranks: int, *overrides: str) -> Path:
    train(Path(TENSOR), (*overrides, "callbacks.2.every=100 steps"), ranks, str(folder), None)
    return folder


@pytest.mark.parametrize(
    ("overrides", "node", "wiped"), [((), 1, True), (tuple(ZERO), 0, False)], ids=["tensor", "zero-2"]
)
def test_a_node_that_is_lost_with_its_memory(
    nodes: Callable[..., Nodes], tmp_path: Path, overrides: tuple[str, ...], node: int, wiped: bool
) -> None:
    """A memory that a node's dead processes left is removed, not read, when the node starts again."""
    job = nodes(2, *overrides)
    job.at_step(48)
    job.lose(node, wiped)
    job.processes[node] = job.begin(node)
    for screen in job.finish():
        print(screen)
        assert re.search(r"^goes on from step (45|50|55) in memory on 2 ranks of nodes 0, 1$", screen, re.M)
    assert not job.different(undisturbed(tmp_path / "alone", 2, *overrides))


def test_two_neighbours_that_are_lost_with_their_memories(
    nodes: Callable[..., Nodes], tmp_path: Path
) -> None:
    """Node 1's files were in its memory and in node 2's: what is left is the disk, and all screens say why."""
    layout = ["strategy.tensor=1", "strategy.sharding=3", "train.batch=9"]
    job = nodes(3, *layout, "callbacks.2.every=20 steps")
    job.at_step(48)
    for node in (1, 2):
        job.lose(node)
    for node in (1, 2):
        job.processes[node] = job.begin(node)
    said = (
        r"^goes on from step (40|60) on disk \(of step \d+ no node's memory has the files of rank 1: their node and "
        r"the next one, with the copies, are lost\) on 3 ranks of nodes 0, 1, 2$"
    )
    for screen in job.finish():
        print(screen)
        assert re.search(said, screen, re.M)
    assert not job.different(undisturbed(tmp_path / "alone", 3, *layout))


def test_a_node_that_does_not_come_back(nodes: Callable[..., Nodes], tmp_path: Path) -> None:
    """The other one goes on alone: its memory has all files."""
    job = nodes(2, "strategy.tensor=1", "watch.rejoin=4 s", least_nodes=1)
    job.at_step(48)
    job.lose(1)
    job.processes.pop()
    [screen] = job.finish()
    print(screen)
    assert re.search(r"^goes on from step (45|50|55) in memory on 1 rank of node 0$", screen, re.M)
    alone = losses(undisturbed(tmp_path / "alone", 2, "strategy.tensor=1"))
    steps = losses(job.out)
    assert steps.keys() == alone.keys() and max(abs(steps[step] - alone[step]) for step in steps) < 1e-5
