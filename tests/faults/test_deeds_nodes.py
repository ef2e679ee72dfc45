"""Two machines whose network or paddle-dp fails in the middle of a training (see test_deeds.py).

They are two network namespaces, joined by a cable that this process carries (tests/faults/wire.py): 200 ms of latency,
packets that are lost in both directions or in one, machines that go and come.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.checkpoint import checkpoints, step_of
from paddle_dp.launch.processes import kill_all, marked
from tests.eventually import eventually
from tests.faults import deeds
from tests.faults.conftest import MARK
from tests.faults.deeds import LAYOUTS, Draw, Layout, Record, Training
from tests.faults.lost import train
from tests.faults.namespaces import begin, finish, kill_node, needs_root
from tests.faults.wire import Wire, wired

pytestmark = [pytest.mark.long, needs_root, pytest.mark.timeout(500)]
SILENCE = ("watch.node=4 s", "watch.rejoin=60 s")
AGAIN = {"restarts": 4}
LATENCY = 0.2  # seconds of a packet


@dataclass
class Nodes:
    """A job on two nodes, with their `paddle-dp`."""

    layout: Layout
    draw: Draw
    wire: Wire
    out: Path
    overrides: tuple[str, ...]
    job: dict[str, Any]
    env: dict[str, str]
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    screens: list[str] = field(default_factory=list)  # of processes that were killed
    done: int = 0

    def start(self, node: int) -> subprocess.Popen[str]:
        return begin(
            self.wire.spaces[node], node, self.out, "train", *self.overrides, job=self.job, env=self.env
        )

    def reach(self, step: int, node: int = 0, seconds: float = 150.0) -> int:
        """Waits for an update of one node's ranks."""
        process = self.processes[node]
        training = Training(process.pid, lambda: "")
        return training.reach(step, self.layout.ranks // 2, seconds)

    def newest(self) -> int:
        saved = checkpoints(self.out / "checkpoints")
        return step_of(saved[-1]) if saved else 0

    def saved_after(self, step: int, seconds: float = 150.0) -> int:
        eventually(lambda: self.newest() > step, seconds, pause=0.05)
        return self.newest()

    def attempts(self) -> int:
        return len(list((self.out / "logs").glob("attempt-*")))


def latency_for_a_while(nodes: Nodes) -> None:
    nodes.wire.delay = LATENCY
    time.sleep(6.0)
    nodes.wire.delay = 0.0


def short_partition(nodes: Nodes) -> None:
    nodes.wire.dead = {0, 1}
    time.sleep(2.5)
    nodes.wire.dead = set()


def long_partition(nodes: Nodes) -> None:
    nodes.wire.dead = {0, 1}
    time.sleep(9.0)
    nodes.wire.dead = set()


def one_way_partition(nodes: Nodes) -> None:
    """Node 1 hears node 0, and is not heard."""
    nodes.wire.dead = {1}
    time.sleep(9.0)
    nodes.wire.dead = set()


def endless_partition(nodes: Nodes) -> None:
    nodes.wire.dead = {0, 1}
    eventually(lambda: all(process.poll() is not None for process in nodes.processes), 60)
    nodes.wire.dead = set()


def kill_and_return(node: int) -> Callable[[Nodes], None]:
    def do(nodes: Nodes) -> None:
        kill_node(nodes.processes[node])
        time.sleep(nodes.draw.random.uniform(0.0, 3.0))
        nodes.processes[node] = nodes.start(node)

    return do


def kill_rank(node: int) -> Callable[[Nodes], None]:
    def do(nodes: Nodes) -> None:
        [pid] = deeds.ranks_below(nodes.processes[node].pid).values()
        deeds.kill(pid)

    return do


def go_and_come(nodes: Nodes) -> None:
    """Node 1 goes, node 0 trains alone, node 1 comes; and once more."""
    for _ in range(2):
        attempts = nodes.attempts()
        kill_node(nodes.processes[1])
        eventually(lambda attempts=attempts: nodes.attempts() > attempts, 60, pause=0.05)
        nodes.saved_after(nodes.newest())
        nodes.processes[1] = nodes.start(1)
        eventually(lambda attempts=attempts: nodes.attempts() > attempts + 1, 60, pause=0.05)
        nodes.saved_after(nodes.newest())


@dataclass(frozen=True, kw_only=True)
class Deed:
    """`causes`: patterns that the screens of node 0 and of node 1 are to have; "" where nothing is to be said."""

    do: Callable[[Nodes], None]
    status: int = 0
    causes: tuple[str, str] = ("", "")
    job: dict[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    resumes: bool = False
    until: float = 0.5


LOST = r"node {}\b.* is lost: "
SILENT = "nothing was heard of it for \\d+ s"
BOTH = (LOST.format(1) + SILENT, r"(node 0 .*is lost: |node 1 \(.*\) is lost: )" + SILENT)
KILLED = LOST + "the connection was closed"
DEEDS = {
    "200 ms of latency for 6 s": Deed(do=latency_for_a_while),
    "a partition of 2.5 s": Deed(do=short_partition),
    "a partition of 9 s": Deed(do=long_partition, causes=BOTH, job=AGAIN, overrides=SILENCE),
    "a partition of 9 s, one way": Deed(
        do=one_way_partition, causes=(LOST.format(1) + SILENT, ""), job=AGAIN, overrides=SILENCE
    ),
    "a partition that stays": Deed(
        do=endless_partition, status=1, causes=BOTH, overrides=("watch.node=4 s",), resumes=True
    ),
    "kill -9 of a rank of node 1": Deed(
        do=kill_rank(1), causes=(r"failed: rank 1 of 2 on \S+: ended by SIGKILL",) * 2, job=AGAIN
    ),
    "node 1 is killed, and returns": Deed(do=kill_and_return(1), causes=(KILLED.format(1), ""), job=AGAIN),
    "node 0 is killed, and returns": Deed(do=kill_and_return(0), causes=("", KILLED.format(0)), job=AGAIN),
    "--nodes 1:2, node 1 goes and comes twice": Deed(
        do=go_and_come, causes=(KILLED.format(1) + r"(.|\n)*has come: saving a checkpoint", ""),
        job={**AGAIN, "least_nodes": 1}, overrides=("watch.rejoin=2 s",), until=0.1,
    ),
}  # fmt: skip
SLOW = "0.06"  # seconds: at a load of 8 a node takes 7 s to come, in which 140 steps of 0.02 s were over
ROWS = [
    ("200 ms of latency for 6 s", "data"),
    ("200 ms of latency for 6 s", "sharding 3"),
    ("200 ms of latency for 6 s", "pipeline"),
    ("a partition of 2.5 s", "tensor"),
    ("a partition of 2.5 s", "local_sgd"),
    ("a partition of 9 s", "data"),
    ("a partition of 9 s", "pipeline"),
    ("a partition of 9 s, one way", "sharding 2"),
    ("a partition that stays", "sharding 1"),
    ("kill -9 of a rank of node 1", "sequence"),
    ("node 1 is killed, and returns", "bfloat16"),
    ("node 0 is killed, and returns", "tensor"),
    ("--nodes 1:2, node 1 goes and comes twice", "data, 300 slow steps"),
]


@pytest.fixture
def wire() -> Iterator[Wire]:
    with wired() as cable:
        yield cable
        left = marked(MARK, cable.spaces[0])
        kill_all(lambda: marked(MARK, cable.spaces[0]))
    assert not left, "processes were left behind"


@pytest.mark.parametrize(("deed", "layout"), deeds.grouped(ROWS))
def test_deed(
    wire: Wire, tmp_path: Path, undisturbed: Any, noted: Any, capsys: Any, deed: str, layout: str
) -> None:
    made, way = DEEDS[deed], LAYOUTS[layout]
    draw = Draw(f"{deed}, {layout}", way.length, made.until)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    overrides = (*way.overrides, *made.overrides)
    job = {"recipe": str(way.path), "ranks": way.ranks // 2, **made.job}
    nodes = Nodes(
        way, draw, wire, tmp_path / "run", overrides, job, env={"TMPDIR": str(temporary), "SLOW": SLOW}
    )
    nodes.processes = [nodes.start(0), nodes.start(1)]
    nodes.done = nodes.reach(draw.step)
    made.do(nodes)
    ended = finish(nodes.processes, timeout=150)
    with capsys.disabled():
        print(f"\n{deed}, {layout}: after step {nodes.done} (drawn: {draw.step}, seed {deeds.SEED})")
    assert [status for status, _, _ in ended] == [made.status] * 2, ended
    for pattern, (_, _, screen) in zip(made.causes, ended, strict=True):
        wanted = re.search(pattern, screen) if any(made.causes) else not screen
        assert wanted, f"{pattern!r} is not on the screen, or more is: {screen}"
    if made.resumes:
        train(way.path, overrides, way.ranks, str(nodes.out), "newest")
    left = deeds.left_behind(nodes.out, temporary, set())
    faults = deeds.apart(Record.of(nodes.out), undisturbed(way), way.promise, way.length)
    assert not left and not faults, (left, faults, ended)
    noted(deed, layout, nodes.done, made.status, way.promise)
