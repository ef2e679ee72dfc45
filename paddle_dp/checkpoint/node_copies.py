"""Checkpoints in the memories of several nodes: the files of each rank in its node's memory, and copies in the next
node's.

A checkpoint is a folder as on disk. Each node has the manifest, the state, the files of its ranks, and copies of
the files of the node before it in a ring: any node may be lost, with its memory, and the others have all files. A node
writes the manifest, which has the checksums of all files, after every rank has its files and its copies in place.
A kill in the middle leaves no manifest, and the checkpoint before stays until the next one is in place on all nodes.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.disk import Digest, write
from paddle_dp.checkpoint.folder import publish
from paddle_dp.checkpoint.manifest import (
    MANIFEST,
    STATE,
    UnusableError,
    checkpoints,
    index_name,
    manifest_of,
    read_manifest,
    step_name,
    step_of,
    tensors_name,
)
from paddle_dp.checkpoint.saving import Snapshot, make_partial, seal, together, write_rank
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import transport
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.text import numbered

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh

SPEC = re.compile(r"memory:([0-9]+):([0-9a-f]{32})")  # step and key, as the argument of a resume
CHANNEL = CHANNELS["copies"]
# A file that is missing is the memory of a supervisor that is gone.
_agreed = functools.partial(together, slow=False, shared=False)


@dataclass(frozen=True)
class Generation:
    """A checkpoint as one node has it in memory.

    `key`: the digest of its manifest, by which files of different checkpoints of one step are never mixed. `ranks`: the
    number of ranks that saved it; `intact`: the ranks whose files are here, byte by byte as they were written.
    """

    step: int
    key: str
    ranks: int
    intact: tuple[int, ...]

    @property
    def spec(self) -> str:
        return f"memory:{self.step}:{self.key}"


@dataclass(frozen=True)
class Ring:
    """The ranks of each node; a node's files are copied to the next node, the last one's to the first."""

    nodes: tuple[tuple[int, ...], ...]

    @classmethod
    def from_memories(cls, memories: Sequence[str]) -> Ring:
        """Returns the ring of ranks with these folders in memory, in rank order: each node has another one."""
        names = dict.fromkeys(memories)
        return cls(tuple(tuple(r for r, memory in enumerate(memories) if memory == name) for name in names))

    def node(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.nodes) if rank in ranks)

    def first(self, rank: int) -> int:
        """Returns the first rank of a rank's node, which makes, publishes and removes the node's folders."""
        return self.nodes[self.node(rank)][0]

    def keeper(self, rank: int) -> int:
        """Returns the rank of the next node that writes the copies of a rank's files."""
        node = self.node(rank)
        keepers = self.nodes[(node + 1) % len(self.nodes)]
        return keepers[self.nodes[node].index(rank) % len(keepers)]

    def sources(self, rank: int) -> list[int]:
        """Returns the ranks whose copies a rank writes."""
        return [source for source in self.nodes[self.node(rank) - 1] if self.keeper(source) == rank]

    def rooms(self, sizes: Sequence[int], count: int) -> list[int]:
        """Returns the bytes that each node's memory needs, from the bytes of each rank's files.

        It keeps its own files and its copies of `count` checkpoints. A restart completes one of them on each node, for
        the layout may be another one then.
        """
        totals = [sum(sizes[rank] for rank in ranks) for ranks in self.nodes]
        if len(totals) == 1:
            return [count * totals[0]]
        return [(count - 1) * (total + totals[node - 1]) + sum(totals) for node, total in enumerate(totals)]


def newest_complete(stocks: Iterable[Iterable[Generation]]) -> tuple[Generation | None, str]:
    """Returns the newest generation of which the nodes' `stocks` have all files; and a sentence if there is none, or if
    a later one lacks some, else "". `intact` of the result: all ranks."""
    intact: dict[tuple[int, str, int], set[int]] = {}
    for generation in (generation for stock in stocks for generation in stock):
        ranks = intact.setdefault((generation.step, generation.key, generation.ranks), set())
        ranks.update(generation.intact)
    missing = {row: sorted(set(range(row[2])) - ranks) for row, ranks in intact.items()}
    newest = max((row for row, ranks in missing.items() if not ranks), default=None)
    missing = {
        row: ranks for row, ranks in missing.items() if ranks and (newest is None or row[0] > newest[0])
    }
    reason = ""
    if missing:
        latest = max(missing)
        reason = (
            f"of step {latest[0]} no node's memory has the files of {numbered('rank', missing[latest])}: their node "
            "and the next one, with the copies, are lost"
        )
    elif newest is None:
        reason = "no node's memory has a checkpoint"
    return (Generation(*newest, tuple(range(newest[2]))) if newest else None), reason


def generations(folder: Path) -> list[Generation]:
    """Returns the generations in a node's `folder` that passed the checks before they were saved; reads every byte."""
    rows = []
    for path in checkpoints(folder):
        with suppress(UnusableError, OSError):
            manifest, names = read_manifest(path), set(_good_files(path))
            if STATE in names and manifest.checks is not None and manifest.checks.fault is None:
                intact = (r for r in range(manifest.ranks) if {index_name(r), tensors_name(r)} <= names)
                rows.append(Generation(step_of(path), _key(path), manifest.ranks, tuple(intact)))
    return rows


def save(snapshot: Snapshot, folder: Path, mesh: Mesh, ring: Ring) -> Path:
    """Saves `folder`/step-… in the memory of each node, with copies of the node before. Collective; `folder` is another
    one on each node. Raises the errors of `checkpoint.save`, and leaves nothing of this step then."""
    final = folder / step_name(snapshot.step)
    rank, first = mesh.rank, ring.first(mesh.rank)
    names = _agreed(mesh, final, lambda: make_partial(final) if rank == first else "")
    partial = folder / names[first]
    try:
        reports = _agreed(mesh, final, lambda: write_rank(snapshot, partial, rank))
        # Of rank 0, as on disk.
        states = _agreed(
            mesh, final, lambda: json_codec.encode(snapshot.state).decode() if mesh.is_main else ""
        )
        _agreed(mesh, final, lambda: _exchange(partial, reports, mesh, ring))
        files = {name: Digest(*numbers) for report in reports for name, numbers in report.items()}

        def finish() -> str:
            seal(partial, final, files, states[0].encode(), snapshot.checks)
            return _key(final)

        keys = _agreed(mesh, final, lambda: finish() if rank == first else "")
        if len({keys[ranks[0]] for ranks in ring.nodes}) > 1:
            raise CheckpointError(f"The nodes disagree on the content of {final.name} in memory.")
    except CheckpointError:
        if rank == first:
            for path in (partial, final):
                shutil.rmtree(path, ignore_errors=True)
        mesh.wait("checkpoint in memory undone")
        raise
    return final


def complete(spec: str, mesh: Mesh, memory: str) -> Path:
    """Copies the files that this node's memory lacks of a generation from other nodes' memories. Collective.

    `memory`: the job's folder in this node's memory, "" without one. Returns the generation's folder in it. Raises
    CheckpointError, on every rank, if no node has a file.
    """
    match, memories = SPEC.fullmatch(spec), mesh.gather(memory)
    if match is None or not all(memories):
        raise CheckpointError(f"{spec} is no checkpoint in the memory of this job's nodes.")
    ring, final, key = (
        Ring.from_memories(memories),
        Path(memory, "checkpoints", step_name(int(match[1]))),
        match[2],
    )
    is_first = mesh.rank == ring.first(mesh.rank)
    local_names = [MANIFEST, *_good_files(final)] if is_first and _key(final) == key else []
    names = mesh.gather(local_names)
    local_manifest = (final / MANIFEST).read_bytes() if local_names else b""
    manifest = next((content for content in mesh.gather_bytes(local_manifest) if content), b"")
    if blake2b(manifest, digest_size=16).hexdigest() != key:
        raise CheckpointError(f"{final.name} is in no node's memory any more.")

    def fetch() -> None:
        if not is_first:
            return
        files = manifest_of(manifest, final).files
        moves = _moves(files, names, [ranks[0] for ranks in ring.nodes])
        for provider, receiver, name in moves:
            if provider == mesh.rank:
                transport.endpoint().send(CHANNEL, receiver, _mapped(final / name))
        rows = [(provider, name, files[name]) for provider, receiver, name in moves if receiver == mesh.rank]
        if not rows:
            return
        partial = final.parent / make_partial(final)
        for name in set(local_names) - {MANIFEST}:
            os.link(final / name, partial / name)
        _receive(partial, rows)
        write(partial / MANIFEST, [manifest])
        publish(partial, final)

    with mesh.waiting("the files of a checkpoint in memory"):
        _agreed(mesh, final, fetch)
    return final


def _moves(
    files: Iterable[str], names: Sequence[Sequence[str]], firsts: Sequence[int]
) -> list[tuple[int, int, str]]:
    """Returns (provider, receiver, name) of each file to send, from the `names` that each first rank's node has.
    Raises CheckpointError for a file that no node has."""
    moves = []
    for name in sorted(files):
        provider = next((rank for rank in firsts if name in names[rank]), None)
        if provider is None:
            raise CheckpointError(f"{name} is in no node's memory any more")
        moves += [(provider, rank, name) for rank in firsts if name not in names[rank]]
    return moves


def _exchange(partial: Path, reports: Sequence[Mapping[str, Any]], mesh: Mesh, ring: Ring) -> None:
    """Sends this rank's files to its keeper, and writes the copies that it keeps itself."""
    keeper, sources = ring.keeper(mesh.rank), ring.sources(mesh.rank)
    with mesh.waiting("the copies of a checkpoint in memory"):
        for name in reports[mesh.rank]:
            transport.endpoint().send(CHANNEL, keeper, _mapped(partial / name))
        copies = [(source, *row) for source in sources for row in reports[source].items()]
        _receive(partial, [(source, name, Digest(*numbers)) for source, name, numbers in copies])


def _receive(partial: Path, rows: Iterable[tuple[int, str, Digest]]) -> None:
    """Receives files, (source, name, digest), and writes them. Raises CheckpointError for a damaged one, after all have
    been received: the next exchange must not find them."""
    error: Exception | None = None
    for source, name, digest in rows:
        data = transport.endpoint().receive(CHANNEL, source)
        try:
            if error is None and write(partial / name, [memoryview(data)]) != digest:
                raise CheckpointError(f"the copy of {name} is not as rank {source} wrote it")
        except (OSError, CheckpointError) as failure:
            error = failure
    if error is not None:
        raise error


def _mapped(path: Path) -> memoryview:
    """Returns a file's bytes without reading them into this process; b"" if it is gone, which the receiver refuses."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        return memoryview(b"")


def _good_files(path: Path) -> list[str]:
    """Returns the names of a generation's files that are here as they were written, without the manifest."""
    names = []
    with suppress(UnusableError):
        manifest = read_manifest(path)
        for name in manifest.files:
            with suppress(UnusableError):
                manifest.verify(path, [name])
                names.append(name)
    return names


def _key(path: Path) -> str:
    """Returns the digest of a generation's manifest; "" without one."""
    try:
        return blake2b((path / MANIFEST).read_bytes(), digest_size=16).hexdigest()
    except OSError:
        return ""
