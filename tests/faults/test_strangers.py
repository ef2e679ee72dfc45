"""Another user of the same machine, while a job trains: reads nothing of it, changes nothing, and does not stop it.

What the stranger tries: 1000 messages to each port that a process of the job listens at, odd ones and ones that are
almost right; each of its Unix sockets; the memory, the environment and the open files of each process; its run folder.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paddle_dp.launch.command import Job
from paddle_dp.launch.network import _is_free
from paddle_dp.mesh.sockets import DIGITS, HELLO
from tests.faults.conftest import Started
from tests.faults.slow_run import losses
from tests.jobs import run_in_forks
from tests.strangers import NOBODY, as_stranger, needs_another_user

MESSAGES = 1000  # to each port
AT_ONCE = 100
STEPS = 60
SLOW = "tests/faults/slow.yaml"
GPT = "tests/faults/slow_hybrid.yaml"
JOBS = {
    "data_parallel": (SLOW, "use: data_parallel"),
    "data_parallel, exchange: after": (SLOW, "use: data_parallel, exchange: after"),
    "sharding 2, stage 3": (SLOW, "use: hybrid, sharding: 2, sharding_stage: 3"),
    "pipeline 2": (GPT, "use: hybrid, pipeline: 2"),
    "tensor 2": (GPT, "use: hybrid, tensor: 2"),
    "branches": (SLOW, "use: branches, over: 2", "model={use: tests.strategies.test_branches.Deep}"),
    "parameter_server": (SLOW, "use: parameter_server"),
    "parameter_server, async": (SLOW, "use: parameter_server, mode: async"),
    "local_sgd": (SLOW, "use: local_sgd, every: 4 steps"),
    "async_average": (SLOW, "use: async_average, staleness: 2"),
}
UNORDERED = ("parameter_server, async", "async_average")  # whose losses depend on who comes first
pytestmark = needs_another_user


def messages(seed: int) -> Iterator[bytes]:
    """What a stranger says: noise, nothing, lengths that no memory has, and what Paddle's store, the ranks and the
    nodes say to each other, without the secret."""
    dice = random.Random(seed)
    key = b"endpoint/0"
    while True:
        yield from (
            b"",
            dice.randbytes(dice.randrange(1, 300)),
            struct.pack("<qQ", 0, 1 << 62) + dice.randbytes(40),
            struct.pack("<iQ", dice.randrange(8), len(key)) + key + struct.pack("<Q", 9) + b"127.0.0.1",
            HELLO.pack(dice.randbytes(DIGITS), dice.randrange(4), dice.randrange(4), dice.randbytes(32)),
            b"0" * 32 + b"\n" + b"1" * 64 + b' {"say": "join", "node": Infinity}\n',
            b"GET / HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
            b"\xff" * 4096,
        )


class Stranger:
    """Another user, and what of a job it has reached or read: `seen`, by what it tried."""

    def __init__(self, pids: list[int], out: Path, messages: int):
        self.pids, self.out, self.messages = pids, out, messages
        ends = [end for pid in pids for end in psutil.Process(pid).net_connections("all")]
        self.ports = sorted({end.laddr.port for end in ends if end.status == "LISTEN"})
        self.names = sorted({end.laddr for end in ends if end.family == socket.AF_UNIX and end.laddr})
        self.seen: dict[str, list[str]] = {}

    def run(self, report: Path) -> None:
        """In the process of the other user."""
        self._read_processes()
        self._read_files()
        self._reach_sockets()
        answered = {port: self._talk_to(port) for port in self.ports}
        report.write_text(json.dumps({"seen": self.seen, "answered": answered}))

    def _try(self, name: str, what: Callable[[], object]) -> None:
        with suppress(OSError, PermissionError):
            what()
            self.seen.setdefault(name.split("/")[-1], []).append(name)

    def _read_processes(self) -> None:
        for pid in self.pids:
            process = Path(f"/proc/{pid}")
            secrets = [process / name for name in ("environ", "mem", "maps", "auxv", "io")]
            for file in [*secrets, *(process / "fd" / str(number) for number in range(40))]:
                self._try(str(file), lambda file=file: file.open("rb").close())
            self._try(f"a signal to {pid}", lambda pid=pid: os.kill(pid, 0))

    def _read_files(self) -> None:
        self._try(str(self.out), lambda: os.listdir(self.out))
        self._try("recipe.yaml", (self.out / "recipe.yaml").read_bytes)
        for pid in self.pids:
            for file in Path("/dev/shm").glob(f"*{pid}*"):
                self._try(str(file), file.read_bytes)

    def _reach_sockets(self) -> None:
        for name in self.names:
            with socket.socket(socket.AF_UNIX) as end:
                self._try(name, lambda end=end, name=name: end.connect(name.replace("@", "\0", 1)))

    def _talk_to(self, port: int) -> int:
        """How many of the messages a port took."""
        took, words = 0, messages(port)
        for _ in range(self.messages // AT_ONCE):
            ends = [socket.socket() for _ in range(AT_ONCE)]
            for end in ends:
                end.setblocking(False)
                end.connect_ex(("127.0.0.1", port))
            time.sleep(0.05)
            _, ready, _ = select.select([], ends, [], 0.3)
            for end in ready:
                with suppress(OSError):
                    end.send(next(words))
                    took += 1
            time.sleep(0.02)
            for end in ends:
                end.close()
        return took


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own: what is in it has to guard itself."""
    path = Path(tempfile.mkdtemp(prefix="strangers-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def until_step(out: Path, step: int, job: Started, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while not (out / "metrics.jsonl").exists() or max(losses(out), default=0) < step:
        assert time.monotonic() < end and job.process.poll() is None, job.process.communicate()
        time.sleep(0.1)


def attack(pids: list[int], out: Path, folder: Path, sent: int = MESSAGES) -> tuple[Stranger, dict[str, Any]]:
    """What a stranger has seen of these processes, and how many messages each port took of those that were `sent`."""
    stranger, report = Stranger(pids, out, sent), folder / "report"
    report.touch()
    shutil.chown(report, NOBODY)
    os.waitpid(as_stranger(lambda: stranger.run(report)), 0)
    return stranger, json.loads(report.read_text())


@pytest.mark.parametrize(
    ("name", "sent", "starter"),
    [
        ("data_parallel", AT_ONCE, "fork"),  # no port of a job is Paddle's launcher's
        *(pytest.param(name, MESSAGES, "start", marks=pytest.mark.long, id=name) for name in JOBS),
    ],
)
def test_a_stranger_changes_nothing(
    request: pytest.FixtureRequest, folder: Path, name: str, sent: int, starter: str
) -> None:
    recipe, strategy, *more = JOBS[name]
    overrides = [f"strategy={{{strategy}}}", f"train.length={STEPS} steps", *more]
    ranks = 3 if name in UNORDERED else 2
    given = {"recipe": recipe, "overrides": overrides, "ranks": ranks}
    undisturbed = Job(
        **{**given, "recipe": Path(recipe), "overrides": tuple(overrides)}, output_dir=folder / "alone"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW", "0")
        assert run_in_forks(undisturbed) == 0
    variables = {"SLOW": "0.3", "HURRY": str(folder / "hurry")}
    start = request.getfixturevalue(starter)
    job = start("train", env=variables, output_dir=str(folder / "run"), **given)
    until_step(job.out, 3, job)
    stranger, report = attack([job.process.pid, *job.left()], job.out, folder, sent)
    went_on = job.process.poll() is None
    (folder / "hurry").touch()
    status, _, complained = job.finish(timeout=120)
    right, own = losses(folder / "alone"), losses(job.out)
    same = own == right
    print(
        f"| {name} | {len(stranger.ports)} | {sent * len(stranger.ports)} | {sum(report['answered'].values())} "
        f"| {len(report['seen'])} | {'bits' if same else 'in no order'} | {status} |"
    )
    assert status == 0 and went_on, complained
    assert own.keys() == right.keys() and max(own) == STEPS
    assert name in UNORDERED or same
    assert not report["seen"] and not any(report["answered"].values()), report


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["use: data_parallel, exchange: after", "use: parameter_server"])
def test_a_stranger_changes_nothing_of_a_job_on_two_nodes(start, folder: Path, strategy: str) -> None:
    """Their ports are open: who connects has to prove that it knows the secret."""
    overrides = [f"strategy={{{strategy}}}", f"train.length={STEPS} steps"]
    undisturbed = start("train", ranks=2, env={"SLOW": "0"}, recipe=SLOW, overrides=overrides)
    assert undisturbed.finish(timeout=120)[0] == 0
    port = next(filter(_is_free, random.sample(range(61_000, 64_000), 100)))
    given = {"recipe": SLOW, "overrides": overrides, "ranks": 1, "output_dir": str(folder / "run")}
    given |= {"nodes": 2, "master": f"127.0.0.1:{port}"}
    variables = {"SLOW": "0.1", "PADDLE_DP_SECRET": "of the test", "OMP_NUM_THREADS": "1"}
    nodes = [start("train", env=variables, node_rank=number, **given) for number in range(2)]
    until_step(folder / "run", 3, nodes[0])
    pids = [pid for node in nodes for pid in (node.process.pid, *node.left())]
    stranger, report = attack(pids, folder / "run", folder)
    went_on = all(node.process.poll() is None for node in nodes)
    ended = [node.finish(timeout=120) for node in nodes]
    same = losses(folder / "run") == losses(undisturbed.out)
    print(
        f"| two nodes, {strategy} | {len(stranger.ports)} | {MESSAGES * len(stranger.ports)} "
        f"| {sum(report['answered'].values())} | {len(report['seen'])} | {'bits' if same else 'others'} |"
    )
    assert [status for status, _, _ in ended] == [0, 0] and went_on, ended
    assert same and not report["seen"], report


EARLY = """
import socket, time
taken, end = [], time.time() + 100
while time.time() < end:
    for line in open("/proc/net/tcp").read().splitlines()[1:]:
        if line.split()[3] == "0A":
            taken.append(socket.socket())
            taken[-1].settimeout(0.05)
            try: taken[-1].connect(("127.0.0.1", int(line.split()[1].split(":")[1], 16)))
            except OSError: pass
    del taken[:-50]
"""


@pytest.mark.long
@pytest.mark.skipif(
    not all(map(shutil.which, ("unshare", "nsenter", "setpriv", "ip"))),
    reason="takes util-linux and iproute2",
)
def test_a_stranger_who_comes_between_the_ranks_at_their_start_is_named(start) -> None:
    """gloo takes whoever connects first. In a network of its own, so that no other job of this machine is disturbed."""
    alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh"]
    job = start("train", recipe=SLOW, overrides=["strategy.use=data_parallel"], before=alone)
    while b"start.py" not in Path(f"/proc/{job.process.pid}/cmdline").read_bytes().split(b"\0sh\0")[0]:
        time.sleep(0.01)
    inside = [
        "nsenter",
        f"--net=/proc/{job.process.pid}/ns/net",
        "setpriv",
        f"--reuid={NOBODY}",
        "--clear-groups",
    ]
    with subprocess.Popen([*inside, sys.executable, "-c", EARLY]) as stranger:
        status, _, complained = job.finish(timeout=120)
        stranger.kill()
    assert status == 1 and f"user {NOBODY} of this machine has come between the ranks" in complained, (
        complained
    )
