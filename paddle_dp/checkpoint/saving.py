"""Saves a checkpoint: every rank writes its shards, and the checkpoint appears whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.digest import shard_sum
from paddle_dp.checkpoint.disk import Digest, flush_folder, write
from paddle_dp.checkpoint.folder import publish
from paddle_dp.checkpoint.manifest import (
    STATE,
    Checks,
    Manifest,
    checkpoints,
    index_name,
    step_name,
    tensors_name,
)
from paddle_dp.checkpoint.shards import TensorShard, check_complete, index_of, read_index
from paddle_dp.checkpoint.tensor_file import write_tensors
from paddle_dp.errors import CheckpointError

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """One rank's part of a checkpoint: its shards, the state that all ranks share, and this rank's state.

    `state["progress"]["step"]` names the checkpoint. `state` and `rank_state` hold plain JSON values. The keys of
    `tensors` are arbitrary (a shard has its tensor's name), so a rank may save several shards of one tensor. `checks`:
    the results of the checks just before; None if none were made.
    """

    tensors: Mapping[str, TensorShard]
    state: Mapping[str, Any]
    rank_state: Mapping[str, Any] = field(default_factory=dict)
    checks: Checks | None = None

    @property
    def step(self) -> int:
        return int(self.state["progress"]["step"])


class NotWrittenError(CheckpointError):
    """A disk did not take the checkpoint, or not all of it. Training can continue without it.

    `message` lacks the advice; `reason` is the system's text alone, "No space left on device".
    """

    def __init__(self, message: str, advice: str, reason: str = ""):
        self.message, self.advice, self.reason = message, advice, reason
        super().__init__(f"{message} {advice}")


def save(snapshot: Snapshot, folder: Path, mesh: Mesh, slow: bool = True) -> Path:
    """Saves `folder`/step-… atomically, in place of an earlier one of that step. Collective. `slow`: the folder is on a
    disk, which may take longer than a collective waits.

    All ranks must see the same `folder`: on several machines a shared one. Raises, the same on every rank,
    NotWrittenError if a disk does not take it, CheckpointError for any other failure.
    """
    final = Path(folder) / step_name(snapshot.step)
    partial = begin(final, mesh, slow, makes_folder=slow)
    try:
        reports = together(mesh, final, lambda: write_rank(snapshot, partial, mesh.rank), slow)
        if mesh.is_main:  # a lost rank held no part of the model, but its files must exist
            nothing = Snapshot(tensors={}, state={})
            reports += [write_rank(nothing, partial, rank) for rank in sorted(mesh.lost)]
        together(
            mesh, final, lambda: finish(snapshot, partial, final, reports) if mesh.is_main else None, slow
        )
    except CheckpointError:
        if mesh.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        mesh.wait("checkpoint undone")
        raise
    return final


def begin(final: Path, mesh: Mesh, slow: bool = True, makes_folder: bool = True) -> Path:
    """Makes, on rank 0, the hidden folder for the ranks' files; it becomes `final` later. Collective."""
    return (
        final.parent
        / together(mesh, final, lambda: make_partial(final, makes_folder) if mesh.is_main else None, slow)[0]
    )


def together(
    mesh: Mesh, final: Path, work: Callable[[], Any], slow: bool = True, shared: bool = True
) -> list[Any]:
    """Returns every rank's result of `work` by rank, or raises the first failing rank's error on all. Collective.
    `shared`: all ranks see one folder, not each node its memory."""
    try:
        report = {"result": work()}
    except Exception as error:  # noqa: BLE001 - if one rank raised alone, the others would wait for it
        report = {"error": failure_of(error, final, mesh, shared)}
    if slow:  # a disk may take longer than a collective's timeout
        mesh.wait("checkpoint")
    if mesh.is_main and "error" not in report and not final.parent.is_dir():
        report["error"] = deleted(final)  # this error precedes the other ranks'
    reports = mesh.gather(report)
    raise_first([r.get("error") for r in reports])
    return [r["result"] for r in reports]


def raise_first(failures: Iterable[Sequence[str] | None]) -> None:
    """Raises the first of the ranks' failures (results of `failure_of`), if any."""
    for failure in filter(None, failures):
        message, *advice = failure
        raise NotWrittenError(message, *advice) if advice else CheckpointError(message)


def make_partial(final: Path, makes_folder: bool = False) -> str:
    """Makes the hidden folder in which a checkpoint is written, and returns its name."""
    if makes_folder:  # a folder in memory is its job's, and must not come back when that has removed it
        final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.partial-{os.getpid()}-{os.urandom(4).hex()}")
    partial.mkdir()
    return partial.name


def write_rank(snapshot: Snapshot, partial: Path, rank: int) -> dict[str, list[int]]:
    """Writes a rank's shards and their index. Returns [size, CRC-32] of each file."""
    shards, index = index_of(snapshot.tensors.values())
    for key, shard in shards.items():
        index[key]["sum"] = f"{shard_sum(shard):016x}"
    rank_state = json_codec.encode({"pieces": index, "own": snapshot.rank_state}, "own")
    digests = {
        index_name(rank): write(partial / index_name(rank), [rank_state]),
        tensors_name(rank): write_tensors(partial / tensors_name(rank), shards),
    }
    return {name: [s.size, s.crc32] for name, s in digests.items()}


def finish(snapshot: Snapshot, partial: Path, final: Path, reports: Iterable[dict[str, list[int]]]) -> None:
    """Checks that all ranks' files exist, and seals the folder."""
    files = {name: Digest(*numbers) for report in reports for name, numbers in report.items()}
    for name, digest in files.items():
        path = partial / name
        if not path.exists() or path.stat().st_size != digest.size:
            raise CheckpointError(
                f"{name} is not seen by rank 0 as its rank wrote it: all machines must share the folder {final.parent}"
            )
    check_complete([read_index(partial, rank) for rank in range(len(files) // 2)])
    seal(partial, final, files, json_codec.encode(snapshot.state), snapshot.checks)


def seal(
    partial: Path, final: Path, files: Mapping[str, Digest], state: bytes, checks: Checks | None
) -> None:
    """Adds the state and the manifest to a folder with the ranks' `files`, two of each rank, and renames it."""
    digests = {**files, STATE: write(partial / STATE, [state])}
    Manifest(len(files) // 2, digests, checks).write(partial)
    flush_folder(partial)
    publish(partial, final)


def failure_of(error: Exception, final: Path, mesh: Mesh, shared: bool = True) -> list[str]:
    """The error's texts: [message]; for a disk's failure [message, advice, the system's text]."""
    if not isinstance(error, OSError):
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        return [f"The checkpoint {final} was not saved: {kind}{error} (rank {mesh.rank})."]
    if isinstance(error, FileNotFoundError) and (mesh.is_main or not shared):
        return deleted(final)
    if isinstance(error, FileNotFoundError):
        return [
            f"The checkpoint {final} was not saved: rank {mesh.rank} on {socket.gethostname()} does not see the folder "
            f"{final.parent.absolute()} that rank 0 made. All ranks save into one folder: on several machines it must "
            "be on a disk that they share (--output-dir; in a script folder=…). Earlier checkpoints are untouched."
        ]
    advice = "Make room, or name another folder (--output-dir DIR; in a script folder=…), and start again."
    try:
        saved = bool(checkpoints(final.parent))
    except CheckpointError:  # a folder that may not even be read
        saved = False
    if saved:
        advice = (
            f"Make room and resume, or continue elsewhere: --resume {final.parent.parent} --output-dir DIR "
            "(in a script resume=…, folder=…)."
        )
    where = f" ({Path(os.fsdecode(error.filename)).name})" if isinstance(error.filename, str | bytes) else ""
    return [
        f"The checkpoint {final} was not saved: {error.strerror or error}{where}, on rank {mesh.rank} of "
        f"{socket.gethostname()}; {_free(final.parent)} free. Earlier checkpoints are untouched.",
        advice,
        error.strerror or str(error),
    ]


def deleted(final: Path) -> list[str]:
    """Returns the failure of a checkpoint whose folder is gone, in the form of `failure_of`."""
    reason = f"{final.parent.absolute()} was deleted or renamed meanwhile"
    return [f"The checkpoint {final} was not saved: {reason}.", "Start again.", reason]


def still_not(step: int, reason: str, folder: Path) -> str:
    """A sentence for a checkpoint that a disk refused for the same `reason` as the one before.

    The room that it needs is estimated by the size of the newest checkpoint in the folder, if any.
    """
    if reason != os.strerror(errno.ENOSPC):
        return f"{step_name(step)}: not saved either: {reason}."
    saved = checkpoints(folder)
    try:
        size = sum(file.stat().st_size for file in saved[-1].iterdir()) if saved else None
        free = shutil.disk_usage(folder).free
    except OSError:
        return f"{step_name(step)}: still no room."
    needs = f"it needs {_amount(size)}, " if size is not None else ""
    return f"{step_name(step)}: still no room: {needs}{_amount(free)} are free."


def _amount(count: int) -> str:
    return f"{count / 2**20:.1f} MB" if count >= 2**17 else f"{count / 2**10:.1f} KB"


def _free(folder: Path) -> str:
    from paddle_dp.units import Bytes

    for existing in (folder, *folder.parents):
        try:
            return str(Bytes(shutil.disk_usage(existing).free))
        except OSError:
            continue
    return "an unknown amount"
