"""Copies of a checkpoint in other nodes' memories: who keeps which, which generation a restart takes, and that a torn,
stale or foreign copy is never read. Ranks are threads, and nodes are folders."""

from __future__ import annotations

import dataclasses
import errno
import queue
import shutil
import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from paddle_dp.checkpoint import (
    Checks,
    NotWrittenError,
    Snapshot,
    TensorShard,
    check,
    checkpoints,
    load,
    node_copies,
    saving,
)
from paddle_dp.checkpoint.manifest import MANIFEST, STATE, index_name, step_name, tensors_name
from paddle_dp.checkpoint.node_copies import Generation, Ring, complete, generations, newest_complete, save
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import join
from tests.ranks import run_ranks

A, B = "a" * 32, "b" * 32
RING = Ring(((0, 1), (2, 3), (4, 5)))


def test_a_node_is_the_ranks_with_one_folder_and_the_next_node_keeps_its_copies() -> None:
    assert Ring.from_memories(["x", "x", "y", "y", "z", "z"]) == RING
    assert [RING.keeper(rank) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert [RING.sources(rank) for rank in range(6)] == [[4], [5], [0], [1], [2], [3]]
    assert [RING.first(rank) for rank in range(6)] == [0, 0, 2, 2, 4, 4]
    uneven = Ring.from_memories(["x", "x", "x", "y"])
    assert [uneven.keeper(rank) for rank in range(4)] == [3, 3, 3, 0] and uneven.sources(3) == [0, 1, 2]
    assert Ring.from_memories(["x", "y", "x"]).nodes == ((0, 2), (1,))


def test_the_room_of_a_node_is_two_generations_of_which_a_restart_completes_one() -> None:
    assert Ring(((0, 1),)).rooms([3, 4], 2) == [14]
    assert Ring(((0,), (1,))).rooms([3, 4], 2) == [14, 14]
    assert RING.rooms([1, 0, 10, 0, 100, 0], 2) == [101 + 111, 11 + 111, 110 + 111]


def at(step: int, *kept: int, key: str = A, ranks: int = 3) -> Generation:
    return Generation(step, key, ranks, kept)


@pytest.mark.parametrize(
    ("stocks", "step", "reason"),
    [
        ([[at(10, 0, 2), at(20, 0, 2)], [at(10, 1, 0), at(20, 1, 0)], []], 20, ""),
        ([[at(10, 0, 2), at(20, 0, 2)], [], []], None, "of step 20 no node's memory has the files of rank 1"),
        ([[at(10, 0, 2), at(20, 0, 2)], [at(10, 1, 0)]], 10, "of step 20 no node's memory has the files of rank 1"),
        ([[at(10, 0, 1, 2), at(20, 0)], []], 10, "the files of ranks 1, 2"),
        ([[at(20, 0, 2, key=A)], [at(20, 1, 0, key=B)]], None, "of step 20 no node's memory"),  # two pasts
        ([[at(20, 0, 1)], [at(20, 2, ranks=4)]], None, "of step 20 no node's memory"),  # two layouts
        ([[at(20, 0, 1, 2)], [at(10, 0)]], 20, ""),  # what is older is no matter
        ([[], []], None, "no node's memory has a checkpoint"),
        ([], None, "no node's memory has a checkpoint"),
    ],
)  # fmt: skip
def test_the_newest_of_which_all_files_are_somewhere(
    stocks: list[list[Generation]], step: int | None, reason: str
) -> None:
    newest, because = newest_complete(stocks)
    assert (newest and newest.step) == step and reason in because and bool(reason) == bool(because)
    assert newest is None or newest == Generation(step or 0, A, 3, (0, 1, 2))


class Lines:
    """The endpoints of ranks that are threads."""

    def __init__(self) -> None:
        self.here = threading.local()
        # All at once: two threads that both miss a key of a defaultdict get a queue each, and a message is lost.
        self.queues = {pair: queue.Queue[bytearray]() for pair in product(range(6), repeat=2)}
        self.change: Callable[[bytearray], Any] = lambda data: None
        self.bytes = 0

    def send(self, channel: int, rank: int, *data: memoryview) -> None:
        message = bytearray(b"".join(data))
        self.change(message)
        self.bytes += len(message)
        self.queues[self.here.rank, rank].put(message)

    def receive(self, channel: int, rank: int) -> bytearray:
        return self.queues[rank, self.here.rank].get(timeout=60)

    @property
    def waiting(self) -> int:
        return sum(line.qsize() for line in self.queues.values())


class Nodes:
    """Six ranks on three nodes, each with a folder as its memory."""

    def __init__(self, folder: Path, on_ranks: Any, snapshot_of: Any, lines: Lines):
        self.memories = [folder / f"memory-{node}" for node in range(3)]
        self.lines, self._on_ranks, self._snapshot_of = lines, on_ranks, snapshot_of
        for node in range(3):
            self.begin(node)

    def begin(self, node: int) -> None:
        """An empty memory, as of a node that has returned."""
        shutil.rmtree(self.memories[node], ignore_errors=True)
        (self.memories[node] / "checkpoints").mkdir(parents=True)

    def path(self, node: int, step: int) -> Path:
        return self.memories[node] / "checkpoints" / step_name(step)

    def on_ranks(self, work: Callable[[Any, Path], Any]) -> list[Any]:
        def run(mesh: Any) -> Any:
            self.lines.here.rank = mesh.rank
            return work(mesh, self.memories[mesh.rank // 2])

        return self._on_ranks(6, run)

    def save(self, step: int) -> list[Any]:
        def work(mesh: Any, memory: Path) -> Path:
            snapshot = self._snapshot_of(step, mesh.rank, 6)
            checks = Checks(agreed=True, finite=True, step=step)
            return save(dataclasses.replace(snapshot, checks=checks), memory / "checkpoints", mesh, RING)

        return self.on_ranks(work)

    def stocks(self) -> list[list[Generation]]:
        return [generations(memory / "checkpoints") for memory in self.memories]

    def complete(self, generation: Generation | None) -> list[Any]:
        assert generation is not None
        return self.on_ranks(lambda mesh, memory: complete(generation.spec, mesh, str(memory)))


@pytest.fixture
def nodes(on_ranks: Any, snapshot_of: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    lines = Lines()
    monkeypatch.setattr(node_copies.transport, "endpoint", lambda: lines)
    with TemporaryDirectory(dir="/dev/shm") as folder:  # nothing waits for a disk there
        yield Nodes(Path(folder), on_ranks, snapshot_of, lines)


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def names(*ranks: int) -> set[str]:
    return {STATE, MANIFEST, *(name for rank in ranks for name in (index_name(rank), tensors_name(rank)))}


def test_each_node_has_its_files_and_the_node_before_its(nodes: Nodes) -> None:
    assert nodes.save(10) == [nodes.path(rank // 2, 10) for rank in range(6)]
    assert [set(content(nodes.path(node, 10))) for node in range(3)] == [
        names(4, 5, 0, 1), names(0, 1, 2, 3), names(2, 3, 4, 5),
    ]  # fmt: skip
    assert len({(nodes.path(node, 10) / MANIFEST).read_bytes() for node in range(3)}) == 1
    assert [[g.intact for g in stock] for stock in nodes.stocks()] == [
        [(0, 1, 4, 5)],
        [(0, 1, 2, 3)],
        [(2, 3, 4, 5)],
    ]


@pytest.mark.parametrize("lost", [(), (0,), (1,), (2,)])
def test_without_any_node_the_others_complete_the_newest_one_and_nothing_else_is_sent(
    nodes: Nodes, lost: tuple[int, ...]
) -> None:
    nodes.save(10)
    nodes.save(20)
    for node in lost:
        nodes.begin(node)
    newest, reason = newest_complete(nodes.stocks())
    assert newest is not None and newest.step == 20 and not reason
    nodes.lines.bytes = 0
    assert nodes.complete(newest) == [nodes.path(rank // 2, 20) for rank in range(6)]
    contents = [content(nodes.path(node, 20)) for node in range(3)]
    assert contents[0] == contents[1] == contents[2] and set(contents[0]) == names(*range(6))
    check(nodes.path(0, 20))
    sizes = {name: len(text) for name, text in contents[0].items() if name not in (MANIFEST, STATE)}
    copies = sum(sizes.values())  # a third of them to each of three nodes
    if lost:
        copies += sum(sizes[name] for name in names(*range(6)) & sizes.keys()) * 2 // 3 + len(
            contents[0][STATE]
        )
    assert abs(nodes.lines.bytes - copies) <= max(sizes.values())
    nodes.lines.bytes = 0
    nodes.complete(newest)
    assert not nodes.lines.bytes and not nodes.lines.waiting


def test_without_two_neighbours_it_is_refused_and_the_reason_given(nodes: Nodes) -> None:
    nodes.save(10)
    newest, _ = newest_complete(nodes.stocks())
    for node in (1, 2):
        nodes.begin(node)
    missing, reason = newest_complete(nodes.stocks())
    assert missing is None and "of step 10 no node's memory has the files of ranks 2, 3" in reason
    assert all("is in no node's memory any more" in str(error) for error in nodes.complete(newest))
    nodes.begin(0)
    assert all("is in no node's memory any more" in str(error) for error in nodes.complete(newest))
    assert all("is no checkpoint in the memory" in str(error) for error in nodes.on_ranks(
        lambda mesh, memory: complete(f"memory:10:{A}", mesh, "" if mesh.rank == 5 else str(memory))
    ))  # fmt: skip


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "step"),
    [
        (lambda path: flipped(path / tensors_name(0)), 20),  # the next node has a copy
        (lambda path: flipped(path / MANIFEST), 20),
        (lambda path: (path / STATE).unlink(), 20),
        (lambda path: (path / MANIFEST).unlink(), 20),
        (lambda path: path.rename(path.with_name(".step-00000020.partial-1-ab")), 20),
        (lambda path: (path / index_name(1)).write_bytes(b"{}"), 20),
    ],
)  # fmt: skip
def test_a_torn_copy_is_not_read(nodes: Nodes, damage: Callable[[Path], Any], step: int) -> None:
    for each in (10, 20):
        nodes.save(each)
    good = content(nodes.path(1, step))
    damage(nodes.path(0, 20))
    newest, _ = newest_complete(nodes.stocks())
    assert newest is not None and newest.step == step
    nodes.complete(newest)
    for node in range(3):
        check(nodes.path(node, step))
    assert {name: text for name, text in content(nodes.path(0, step)).items() if name in good} == good
    for node in (0, 1):  # now both copies of rank 0's tensors
        flipped(nodes.path(node, 20) / tensors_name(0))
    flipped(nodes.path(2, 20) / tensors_name(0))
    newest, reason = newest_complete(nodes.stocks())
    assert newest is not None and newest.step == 10 and "of step 20" in reason and "rank 0" in reason


def test_a_kill_between_the_manifests_of_two_nodes_leaves_the_checkpoint_before(nodes: Nodes) -> None:
    for step in (10, 20):
        nodes.save(step)
    for node in (1, 2):
        nodes.path(node, 20).rename(nodes.path(node, 20).with_name(".step-00000020.partial-1-ab"))
    newest, reason = newest_complete(nodes.stocks())
    assert newest is not None and newest.step == 10 and "of step 20" in reason
    nodes.complete(newest)
    check(nodes.path(2, 10))


def test_a_checkpoint_whose_checks_found_a_fault_is_none(nodes: Nodes) -> None:
    manifest = node_copies.read_manifest
    nodes.save(10)
    path = nodes.path(0, 10)
    bad = dataclasses.replace(manifest(path), checks=Checks(agreed=False, finite=True, step=10))
    (path / MANIFEST).unlink()
    bad.write(path)
    assert not generations(path.parent)


def test_a_copy_that_is_changed_on_its_way_leaves_nothing_of_its_step(nodes: Nodes) -> None:
    nodes.save(10)
    nodes.lines.change = lambda data: data.__setitem__(-1, data[-1] ^ 1)
    assert all("is not as rank" in str(error) for error in nodes.save(20))
    nodes.lines.change = lambda data: None
    assert not nodes.lines.waiting
    assert [[path.name for path in (memory / "checkpoints").iterdir()] for memory in nodes.memories] == [
        [step_name(10)]
    ] * 3
    nodes.save(20)
    assert [len(checkpoints(memory / "checkpoints")) for memory in nodes.memories] == [2, 2, 2]


@pytest.mark.parametrize(
    "name", [tensors_name(3), STATE]
)  # a copy, and after all copies, when others publish
def test_a_memory_that_is_full_on_one_node_leaves_nothing_of_its_step_on_any(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    nodes.save(10)
    write = node_copies.write

    def full(path: Path, buffers: Any) -> Any:
        if path.is_relative_to(nodes.memories[2]) and path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, buffers)

    for module in (node_copies, saving):
        monkeypatch.setattr(module, "write", full)
    errors = nodes.save(20)
    assert {type(error) for error in errors} == {NotWrittenError} and "No space left" in str(errors[0])
    assert (
        not nodes.lines.waiting and [len([*(m / "checkpoints").iterdir()]) for m in nodes.memories] == [1] * 3
    )


def test_a_memory_that_its_job_has_removed_does_not_come_back(nodes: Nodes) -> None:
    nodes.save(10)
    shutil.rmtree(nodes.memories[1])
    errors = nodes.save(20)
    assert all(isinstance(error, NotWrittenError) and "was deleted" in str(error) for error in errors)
    assert not nodes.memories[1].exists() and isinstance(errors[0], CheckpointError)


def _loses_a_node(folder: str) -> list[Any]:
    """Two ranks, each a node; the second one's memory is lost after two saves."""
    mesh = join()
    memory = Path(folder, f"memory-{mesh.rank}")
    (memory / "checkpoints").mkdir(parents=True)
    ring = Ring.from_memories(mesh.gather(str(memory)))
    for step in (1, 2):
        tensors = {
            "w": TensorShard("w", (2, 3), (mesh.rank, 0), np.full((1, 3), step + mesh.rank, np.float32))
        }
        checks = Checks(agreed=True, finite=True, step=step)
        state = {"progress": {"step": step}}
        save(Snapshot(tensors=tensors, state=state, checks=checks), memory / "checkpoints", mesh, ring)
    if mesh.rank:
        shutil.rmtree(memory / "checkpoints")
        (memory / "checkpoints").mkdir()
    rows = mesh.gather([dataclasses.astuple(each) for each in generations(memory / "checkpoints")])
    newest, _ = newest_complete([[Generation(*row[:3], tuple(row[3])) for row in stock] for stock in rows])
    assert newest is not None
    path = complete(newest.spec, mesh, str(memory))
    return [newest.step, sorted(file.name for file in path.iterdir()), load(path, mesh).read("w").tolist()]


def test_real_ranks_restore_a_lost_node(tmp_path: Path) -> None:
    expected = [2, sorted(names(0, 1)), [[2.0] * 3, [3.0] * 3]]
    assert run_ranks(_loses_a_node, 2, str(tmp_path)) == [expected, expected]
