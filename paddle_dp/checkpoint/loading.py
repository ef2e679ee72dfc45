"""Loads a checkpoint: verifies its files and reads any box of any of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_dp.checkpoint import json_codec
from paddle_dp.checkpoint.digest import TensorSum, digests_of, sum_of, tensor_sums
from paddle_dp.checkpoint.disk import read_bytes
from paddle_dp.checkpoint.manifest import (
    STATE,
    Manifest,
    UnusableError,
    content_of,
    read_manifest,
    tensors_name,
)
from paddle_dp.checkpoint.shards import (
    DTYPES,
    Box,
    Dims,
    ShardInfo,
    assemble,
    check_complete,
    read_index,
    read_rank_file,
)
from paddle_dp.checkpoint.tensor_file import TensorInfo, read_header, read_rows
from paddle_dp.checkpoint.tensors import box_at
from paddle_dp.errors import CheckpointError, similar

if TYPE_CHECKING:
    from paddle_dp.mesh import Mesh


def load(folder: Path, mesh: Mesh | None = None, *, verify: bool = True) -> Checkpoint:
    """Opens a checkpoint after verifying every byte. Raises CheckpointError if it is damaged.

    With a mesh (collective) the ranks share the work, and an error is raised on all of them.
    `verify=False` suits a checkpoint that was just verified.
    """
    folder = Path(folder)
    if mesh is None or mesh.ranks == 1:
        return _open(folder, None if verify else ())
    try:
        names = sorted(read_manifest(folder).files)[mesh.rank :: mesh.ranks]
        opened, error = _open(folder, names if verify else ()), None
    except CheckpointError as failure:
        opened, error = None, str(failure)
    mesh.wait("checkpoint verified")
    failed = [e for e in mesh.gather(error) if e]
    if opened is None or failed:
        raise CheckpointError(failed[0])
    return opened


def _open(folder: Path, names: Sequence[str] | None) -> Checkpoint:
    manifest = read_manifest(folder)
    if manifest.checks is not None and manifest.checks.fault:
        raise UnusableError(folder, manifest.checks.fault)
    manifest.verify(folder, names)
    try:
        with content_of(folder):
            return Checkpoint(folder, manifest)
    except UnusableError:
        raise
    except (CheckpointError, OSError) as error:
        raise UnusableError(folder, f"its content makes no sense ({error})") from error


class Checkpoint:
    """A checkpoint on disk: the shared `state`, each rank's state, and tensors by their whole-model names.

    `checks`: the results of the checks before saving; None if none were made.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        """Use `load` instead, which verifies the files first."""
        self.folder = folder
        self.ranks, self.checks = manifest.ranks, manifest.checks
        state = json_codec.decode(read_bytes(folder / STATE, json_codec.MOST_BYTES))
        self.state = json_codec.mapping(state, STATE)
        self._shards = check_complete(read_index(folder, rank) for rank in range(self.ranks))
        self._headers = [read_header(folder / tensors_name(rank)) for rank in range(self.ranks)]
        for shard in (shard for shards in self._shards.values() for shard in shards):
            info = self._info(shard)
            if (info.dtype, info.shape) != (shard.dtype, shard.box.shape):
                raise CheckpointError(
                    f"{tensors_name(shard.rank)} holds {shard.key} with another shape or dtype than its index says"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' whole-model names, sorted."""
        return tuple(sorted(self._shards))

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """The state that only `rank` saved; None if there was no such rank."""
        if not 0 <= rank < self.ranks:
            return None
        with content_of(self.folder):
            return json_codec.mapping(read_rank_file(self.folder, rank)["own"], "own")

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shards_of(name)[0].global_shape

    def dtype(self, name: str) -> str:
        """Paddle's name of the dtype. `read` returns bfloat16 as uint16, as `paddle.Tensor.numpy()` does."""
        return self._shards_of(name)[0].dtype

    def read(self, name: str, offset: Dims = None, shape: Dims = None) -> np.ndarray:
        """Reads a box of a tensor (default: the whole) into a new array, from all shards that overlap it."""
        shards = self._shards_of(name)
        target = box_at(self, name, offset, shape)
        takes, _ = assemble(target, [shard.box for shard in shards])
        if len(takes) == 1:  # one shard holds the whole box, which saves a copy
            array = self._slice(shards[takes[0][0]], target)
            return array if array.flags.c_contiguous else array.copy()
        result = np.empty(target.shape, np.dtype(DTYPES[shards[0].dtype][1]))
        for number, overlap in takes:
            result[overlap.inside(target)] = self._slice(shards[number], overlap)
        return result

    def digests(self) -> dict[str, str]:
        """The digests of the model's, the optimizer's and the average's tensors, from the saved sums. They do not
        depend on the layout."""
        return digests_of(tensor_sums(shard for shards in self._shards.values() for shard in shards))

    def computed_digests(self) -> dict[str, str]:
        """The same digests, computed from the tensors, all of which are read."""
        sums = {n: TensorSum(self.dtype(n), self.shape(n), sum_of(self.read(n))) for n in self.names}
        return digests_of(sums)

    def first_nan(self) -> str | None:
        """The name of the first tensor that holds NaN, or None. One tensor at a time is in memory."""
        return next((name for name in self.names if self._has_nan(name)), None)

    def without_nan(self) -> Checkpoint:
        """Returns itself. Raises CheckpointError if a tensor holds NaN."""
        if bad := self.first_nan():
            raise CheckpointError(
                f"'{bad}' in {self.folder} holds NaN, so nothing was written: name an earlier one."
            )
        return self

    def _has_nan(self, name: str) -> bool:
        array = self.read(name)
        if self.dtype(name) == "bfloat16":
            return bool(((array & 0x7FFF) > 0x7F80).any())
        return array.dtype.kind == "f" and bool(np.isnan(array).any())

    def _slice(self, shard: ShardInfo, box: Box) -> np.ndarray:
        cut = box.inside(shard.box)
        path = self.folder / tensors_name(shard.rank)
        rows = read_rows(path, self._info(shard), cut[0] if cut else None)
        columns = (slice(None), *cut[1:])
        return rows[columns] if cut else rows

    def _info(self, shard: ShardInfo) -> TensorInfo:
        return self._headers[shard.rank][shard.key]

    def _shards_of(self, name: str) -> list[ShardInfo]:
        if name not in self._shards:
            guess = similar(name, self._shards)
            hint = f" Did you mean '{guess}'?" if guess else ""
            raise CheckpointError(f"The checkpoint {self.folder} has no tensor '{name}'.{hint}")
        return self._shards[name]
