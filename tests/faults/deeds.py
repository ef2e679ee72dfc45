"""Deeds in the middle of a training, and how it must end: each row of test_deeds*.py is a deed and a layout.

A row draws its step and its victims from `DEEDS_SEED` and its own name, prints them, and is short: a small model, and a
few hundred quick steps.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from paddle_dp.checkpoint import check, checkpoints, load
from paddle_dp.launch.processes import alive, descendants, variable
from paddle_dp.mesh.heartbeat import read
from tests.faults.deed_lane import waiting_ranks
from tests.faults.lost import different

SEED = os.environ.get("DEEDS_SEED", "1")
FIRST = 10  # the step from which on deeds are drawn
PERIOD = {"deeds.yaml": 20, "deeds_gpt.yaml": 15}  # steps between checkpoints
LENGTH = {"deeds.yaml": 300, "deeds_gpt.yaml": 120}
QUICK = 0.004  # seconds between two looks at the heartbeats
PATIENCE = tuple(f"watch.{phase}=4 s" for phase in ("patience", "checkpoint", "callbacks", "evaluate"))


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to train on `ranks` ranks. `promise` at the end: the undisturbed run's "bits", its losses and weights to
    1e-6 ("rounding"), or its "samples" in each update, where bits depend on time."""

    ranks: int = 2
    overrides: tuple[str, ...] = ()
    recipe: str = "deeds.yaml"
    promise: str = "bits"
    servers: int = 0
    steps: int = 0  # the recipe's, if 0

    @property
    def path(self) -> Path:
        return Path("tests/faults", self.recipe)

    @property
    def length(self) -> int:
        return self.steps or LENGTH[self.recipe]


def _strategy(words: str, ranks: int = 2, *more: str, **fields: Any) -> Layout:
    return Layout(ranks=ranks, overrides=(f"strategy={{use: {words}}}", *more), **fields)


def _hybrid(words: str, ranks: int = 2, *more: str) -> Layout:
    return _strategy(f"hybrid, {words}", ranks, *more, recipe="deeds_gpt.yaml")


LAYOUTS = {
    "data": Layout(),
    "data, 1000 steps": Layout(overrides=("train.length=1000 steps",), steps=1000),
    "sharding 1": _hybrid("sharding: 2"),
    "sharding 2": _hybrid("sharding: 2, sharding_stage: 2"),
    "sharding 3": _hybrid("sharding: 2, sharding_stage: 3"),
    "tensor": _hybrid("tensor: 2"),
    "pipeline": _hybrid("pipeline: 2"),
    "sequence": _hybrid("sequence: 2"),
    "data 2 tensor 2": _hybrid("data: 2, tensor: 2", 4),
    "tensor 2 pipeline 2": _hybrid("tensor: 2, pipeline: 2", 4),
    "pipeline 2 sharding 2": _hybrid("pipeline: 2, sharding: 2, sharding_stage: 2", 4),
    "single": _strategy("single", 1),
    "replicas": _strategy("replicas, count: 2", 1),
    "bucketed": _strategy("data_parallel, exchange: bucketed"),
    "bfloat16": _strategy("data_parallel, compress: bfloat16"),
    "power_sgd": _strategy("data_parallel, compress: power_sgd rank 2 after 30 steps"),
    "scatter": Layout(overrides=("dataset.reading=scatter",)),
    "float16": Layout(overrides=("train.precision={dtype: float16, scale: 524288}",)),
    "background": Layout(overrides=("callbacks.checkpoint.async=true",)),
    "local_sgd": _strategy("local_sgd, every: 8 steps"),
    "diloco": _strategy("local_sgd, every: 8 steps, outer: {}"),
    "async_average": _strategy("async_average, every: 4 steps", promise="samples"),
    "parameter_server": _strategy("parameter_server, servers: 1", 3, servers=1),
    "parameter_server async": _strategy(
        "parameter_server, servers: 1, mode: async", 3, promise="samples", servers=1
    ),
    "data, 300 slow steps": Layout(
        overrides=(
            "train.length=300 steps",
            "callbacks=[{use: tests.faults.parts.Slow}, {use: metrics, every: 1 step}, "
            "{use: checkpoint, every: 20 steps, keep: 3}]",
        ),
        steps=300,
        promise="rounding",
    ),
    "branches": _strategy("branches, over: 2", 2, "model={use: tests.faults.deed_parts.Deep}"),
}


def grouped(rows: Sequence[tuple[str, str]]) -> list[Any]:
    """Parameters of a test: with xdist's `--dist loadgroup` one worker has all rows of a layout, and trains it
    undisturbed once."""
    return [pytest.param(*row, id=", ".join(row), marks=pytest.mark.xdist_group(row[1])) for row in rows]


class Draw:
    """The step of a row, and its other draws."""

    def __init__(self, row: str, length: int, until: float = 0.8):
        self.random = random.Random(f"{SEED} {row}")
        self.step = self.random.randint(FIRST, int(length * until))

    def rank(self, ranks: int, first: int = 0) -> int:
        return self.random.randrange(first, ranks)


@dataclass
class Training:
    """The processes of a job at work: `root` is its `paddle-dp`."""

    root: int
    screen: Callable[[], str]  # why it has ended, if it has
    ranks: dict[int, int] = field(default_factory=dict)
    pids: set[int] = field(default_factory=set)  # all that were seen

    def reach(self, step: int, ranks: int, seconds: float = 150.0) -> int:
        """Waits until one of this node's `ranks` has done so many updates of its attempt, and returns their number."""
        self.ranks = {}
        end = time.monotonic() + seconds
        while True:
            assert alive(self.root), f"the job has ended before step {step}: {self.screen()}"
            assert time.monotonic() < end, f"the ranks did not come to step {step}: {self.screen()}"
            try:
                memory = _board(self.root)
            except OSError:  # between two attempts
                time.sleep(0.02)
                continue
            # A board that was just made is empty.
            beats = [
                beat
                for slot in range(ranks)
                if memory and (beat := read(memory, slot)) and beat.phase != "start"
            ]
            if beats and (done := max(beat.step for beat in beats)) >= step:
                self.ranks = ranks_below(self.root)
                if len(self.ranks) == ranks:
                    self.pids.update(descendants(self.root))
                    return done
            time.sleep(QUICK)

    def workers(self, rank: int) -> list[int]:
        """The data workers of a rank."""
        return [child.pid for child in psutil.Process(self.ranks[rank]).children()]


def ranks_below(root: int) -> dict[int, int]:
    """The ranks among the descendants of a `paddle-dp`, and their processes. Data workers have the same command."""
    if waiting := waiting_ranks(root):
        children = [_children(pid) for pid in waiting]
        return {rank: pids[0] for rank, pids in enumerate(children) if pids}
    workers = {pid for pid in descendants(root) if _is_worker(pid)}
    here = {pid for pid in workers if _parent(pid) not in workers}
    numbers = {pid: variable(pid, "PADDLE_TRAINER_ID") for pid in here}
    return {int(number): pid for pid, number in numbers.items() if number is not None}


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _board(root: int) -> bytes:
    """The heartbeats that a `paddle-dp` watches. Raises OSError if there are none."""
    for link in Path(f"/proc/{root}/fd").iterdir():
        if "paddle_dp-heartbeat" in os.readlink(link):
            return link.read_bytes()
    raise FileNotFoundError


def _is_worker(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"launch/recipe_rank.py" in command and b"paddle.distributed.launch" not in command
    except OSError:
        return False


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


# How the training stands at the end


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a training has learned: its last checkpoint, and the lines of its updates."""

    checkpoint: Path
    updates: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, run: Path) -> Record:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        updates = tuple(line for line in lines if line["event"] == "step")
        return cls(checkpoint=checkpoints(run / "checkpoints")[-1], updates=updates)


def apart(record: Record, undisturbed: Record, promise: str, length: int) -> list[str]:
    """How the record breaks the promise: sentences, none if it does not."""
    steps = [line["step"] for line in record.updates]
    if steps != list(range(1, length + 1)):
        twice, missing = len(steps) - len({*steps}), sorted({*range(1, length + 1)} - {*steps})
        return [f"{twice} updates are recorded twice, and {missing[:5]} of {length} are missing"]
    faults = []
    both = list(zip(record.updates, undisturbed.updates, strict=True))
    for name in ("record", "loss"):
        if name not in record.updates[0] or (name == "loss" and promise == "samples"):
            continue
        limit = 1e-6 if promise == "rounding" and name == "loss" else 0.0
        others = [one["step"] for one, two in both if abs(one[name] - two[name]) > limit * abs(two[name])]
        if others:
            faults.append(f"{name} of {len(others)} updates differ, of step {others[0]} first")
    if promise == "rounding" and (distance := farthest(record.checkpoint, undisturbed.checkpoint)) > 1e-6:
        faults.append(f"weights differ by {distance:.1e}")
    if promise == "bits" and (tensors := different(record.checkpoint, undisturbed.checkpoint)):
        faults.append(f"{tensors} tensors of {record.checkpoint.name} differ")
    return faults


def farthest(one: Path, other: Path) -> float:
    """The largest difference of two checkpoints' weights."""
    first, second = load(one), load(other)
    names = [name for name in first.names if name.startswith("model")]
    assert names and {*names} <= {*second.names}
    return max(float(abs(first.read(name) - second.read(name)).max()) for name in names)


LEFTOVERS = re.compile(r"partial|^\.step-|\.replaced-|\.deleted-|^\.writable|^\.fuse_hidden|\.tmp$")


def left_behind(run: Path, temporary: Path, shared: set[str]) -> list[str]:
    """What a job that has ended left beside its results, or left half done: names, and why."""
    left = [str(path.relative_to(run)) for path in run.rglob("*") if LEFTOVERS.search(path.name)]
    left += [f"TMPDIR/{path.name}" for path in temporary.iterdir()]
    left += [f"/dev/shm/{name}" for name in shared]
    for path in checkpoints(run / "checkpoints"):
        try:
            check(path)
        except Exception as error:  # noqa: BLE001 - whatever makes it useless
            left.append(f"{path.name} cannot be used: {error}")
    lines = (run / "metrics.jsonl").read_bytes()
    return left + ["metrics.jsonl ends within a line"] * (not lines.endswith(b"\n"))


def in_shared_memory(pids: Sequence[int]) -> set[str]:
    """Files in /dev/shm that bear the number of one of these processes."""
    numbers = "|".join(map(str, pids)) or "none"
    return {name for name in os.listdir("/dev/shm") if re.search(rf"(?<!\d)({numbers})(?!\d)", name)}


# What deeds need


@contextmanager
def control_group(megabytes: int) -> Iterator[Path | None]:
    """A control group below our own, with a limit of its memory; None where none can be made."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    groups = dict(line.split(":", 1)[1].rsplit(":", 1) for line in lines)
    top = Path("/sys/fs/cgroup")
    above = (
        top / "memory" / groups["memory"].lstrip("/") if "memory" in groups else top / groups[""].lstrip("/")
    )
    group = above / f"paddle_dp-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if "memory" in groups else "memory.max")).write_text(
            str(megabytes << 20)
        )
    except OSError:
        if group.exists():
            group.rmdir()
        yield None
        return
    try:
        yield group
    finally:
        end = time.monotonic() + 5.0
        while (group / "cgroup.procs").read_text().strip() and time.monotonic() < end:
            time.sleep(0.05)
        group.rmdir()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[bool]:
    """A file system of this size at `folder`; False where none can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={size},mode=0755", "none", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(["mount", *options], capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path, room: int) -> Path:
    """Fills a disk up to the last `room` bytes, and returns the file that takes them."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for block in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(block)):
                    pass
            except OSError:
                continue
        file.truncate(max(0, file.tell() - room))
    return filler


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


# The table of docs/reliability.md

HEAD = "| deed | layouts and strategies | after steps | exit status | the end has |"
PROMISED = {
    "bits": "the same bits",
    "samples": "the same samples in each update",
    "rounding": "the same losses and weights to 1e-6",
}


def lines_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line of Markdown for each deed, of all its rows."""
    lines = []
    for deed in dict.fromkeys(row["deed"] for row in rows):
        several = [row for row in rows if row["deed"] == deed]
        layouts = ", ".join(dict.fromkeys(_in_a_list(row["layout"]) for row in several))
        steps = sorted(row["step"] for row in several)
        span = f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
        status = ", ".join(dict.fromkeys(str(row["status"]) for row in several))
        ends = ", or ".join(dict.fromkeys(PROMISED.get(row["promise"], row["promise"]) for row in several))
        lines.append(f"| {deed} | {layouts} | {span} | {status} | {ends} |")
    return lines


def _in_a_list(layout: str) -> str:
    """ "data, 1000 steps" as "data (1000 steps)": the commas of the list are between layouts."""
    name, _, detail = layout.partition(", ")
    return f"{name} ({detail})" if detail else name


def write(rows: Sequence[Mapping[str, Any]], page: Path) -> None:
    """Writes the lines into the table of a page, each in place of the same deed's, new ones below."""
    text = page.read_text("utf-8").splitlines()
    first = text.index(HEAD) + 2
    last = next((n for n in range(first, len(text)) if not text[n].startswith("|")), len(text))
    table = {line.split(" | ")[0]: line for line in (*text[first:last], *lines_of(rows))}
    text[first:last] = table.values()
    page.write_text("\n".join(text) + "\n", "utf-8")
