"""Checks that the ranks hold the same model and that all of it is finite, by digests of the bits compared over the
ranks."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from paddle_dp.core.first_not_finite import not_finite
from paddle_dp.errors import DivergenceError, NotFiniteError
from paddle_dp.mesh import Mesh
from paddle_dp.tensors import bytes_of
from paddle_dp.text import and_more, numbered

_AS_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_CYCLE = 8191
_RUN = 128 * _CYCLE  # elements at once: the digest of a large tensor must not take a multiple of its memory
_LANES = 1021  # a prime: swapped rows of a matrix change lanes, too
Named = Iterable[tuple[str, paddle.Tensor]]
Digest = tuple[int, int]
# Of ranks that hold other values.
CHANGED = "Is something changed, or random, on one rank only?"
DRAWN = (
    "Were these weights drawn by something else than Paddle's generator, or after an earlier Trainer.of, which gives "
    "each rank different random numbers? In a script, call paddle.seed(0) before each model is built."
)
CONTINUED = (
    f"{CHANGED} If it is in the optimizer, has that one trained under local_sgd before, which leaves the ranks "
    "different states? Then make another one of the model's parameters, or train there with optimizer_states: averaged."
)


def digests(tensors: Iterable[paddle.Tensor]) -> list[Digest]:
    """Two numbers per tensor, from all of its bits; one read from the device for all tensors.

    Equal bits give equal digests; one changed element, or two swapped ones, change them. On a CPU this takes as long as
    a sum, without a copy (tools/check_cost.py compares the cost with a checkpoint's). A tensor without memory
    (`_dropout_state` of Paddle's LSTM and GRU on a CPU) has (0, 0).
    """
    tensors = [tensor.detach() for tensor in tensors]
    if not all(tensor._is_initialized() for tensor in tensors):
        there = iter(digests(tensor for tensor in tensors if tensor._is_initialized()))
        return [next(there) if tensor._is_initialized() else (0, 0) for tensor in tensors]
    if all(tensor.place.is_cpu_place() for tensor in tensors):
        return [_digest_of_memory(tensor) for tensor in tensors]
    sums = paddle.stack([_on_device(tensor) for tensor in tensors]).tolist()
    return [(plain, weighted) for plain, weighted in sums]


def _digest_of_memory(tensor: paddle.Tensor) -> Digest:
    """Sums 8-byte words in lanes: returns a checksum of the lanes, and one of the remaining bytes."""
    tensor = tensor if tensor.is_contiguous() else tensor.contiguous()
    memory = bytes_of(tensor)  # Tensor.numpy() copies, which takes ten times as long as the sums
    if not (size := memory.size):
        return 0, 0
    row = 8 * _LANES
    lanes_end = size // row * row
    lanes = memory[:lanes_end].view(np.uint64).reshape(-1, _LANES).sum(0, dtype=np.uint64)
    return zlib.crc32(lanes.tobytes()), zlib.crc32(memory[lanes_end:].data)


def _on_device(tensor: paddle.Tensor) -> paddle.Tensor:
    """Two int64 sums [2] over the tensor's bits, plain and weighted by position. Stays on the device."""
    flat = tensor.flatten()
    bits = flat.view(_AS_INTEGERS[flat.element_size()]) if flat.size else flat
    weights = paddle.arange(1, min(bits.size, _RUN) + 1, dtype="int64") % _CYCLE + 1
    sums = paddle.zeros([2], "int64")
    for start in range(0, bits.size, _RUN):
        run = bits[start : start + _RUN].astype("int64")
        sums += paddle.stack([run.sum(), (run * weights[: run.size]).sum()])
    return sums


@dataclass(frozen=True)
class Replica:
    """A tensor of which other ranks may hold replicas: tensors with the same name and slice.

    `slice_index` is the number of the slice, -1 for an unsharded tensor (`Placement.slice_index`).
    """

    name: str
    tensor: paddle.Tensor
    slice_index: int = -1


def check_equal(named: Named, mesh: Mesh, when: str, cause: str = CHANGED) -> None:
    """Raises DivergenceError, naming tensor and rank, unless ranks with a tensor of the same name hold the same bits.

    The tensors are unsharded. Collective.
    """
    _compare([Replica(name, tensor) for name, tensor in named], {}, mesh, when, cause)


def check_sound(
    copies: Iterable[Replica],
    rank_tensors: Named,
    mesh: Mesh,
    when: str,
    excused: Container[str] = (),
    cause: str = CHANGED,
) -> None:
    """Raises NotFiniteError or DivergenceError, naming tensor and rank, unless `copies` and `rank_tensors` are finite
    and all copies of a tensor have the same bits. Collective, with the same error on every rank.

    `rank_tensors` may differ between ranks, such as buffers; `excused` names need not be finite. A copy without memory,
    a weight that was placed but never drawn, is reported as not finite. `cause`: a likely one of other bits, and its
    remedy.
    """
    copies = list(copies)
    empty = {
        copy.name: "it was never given a value"
        for copy in copies
        if copy.tensor.size and not copy.tensor._is_initialized()
    }
    there = [(copy.name, copy.tensor) for copy in copies if copy.name not in empty]
    bad = empty | not_finite([*there, *rank_tensors])
    bad = {name: content for name, content in bad.items() if name not in excused}
    _compare(copies, bad, mesh, when, cause)


def _compare(copies: list[Replica], bad: dict[str, str], mesh: Mesh, when: str, cause: str) -> None:
    """Exchanges one line per tensor."""
    lines = []
    if mesh.ranks > 1:
        bits = digests(copy.tensor if mesh.all_read else _on_host(copy.tensor) for copy in copies)
        lines = [[copy.name, copy.slice_index, *sums] for copy, sums in zip(copies, bits, strict=True)]
    rows = mesh.gather([list(bad.items()), lines])
    _refuse_not_finite([row[0] for row in rows], when)
    _refuse_different([row[1] for row in rows], when, cause)


def _on_host(tensor: paddle.Tensor) -> paddle.Tensor:
    """Copies a tensor to the host, for comparison with a host's digests, which are not the same as a device's."""
    is_there = tensor._is_initialized() and not tensor.place.is_cpu_place()
    return tensor.cpu() if is_there else tensor


def _refuse_not_finite(rows: list[list[list[str]]], when: str) -> None:
    """`rows`: for each rank, its tensors that are not finite, with their content."""
    holders: dict[str, list[int]] = {}
    content: dict[str, str] = {}
    for rank, row in enumerate(rows):
        for name, description in row:
            holders.setdefault(name, []).append(rank)
            content.setdefault(name, description)
    if not holders:
        return
    name, ranks = next(iter(holders.items()))
    holder_phrase = f" on {numbered('rank', ranks, 8)}" if len(rows) > 1 else ""
    more = and_more(holders, phrase=" (and {} more)")
    raise NotFiniteError(f"{when}: '{name}' is not finite{holder_phrase}: {content[name]}{more}.")


def _refuse_different(rows: list[list[list[int | str]]], when: str, cause: str) -> None:
    """`rows`: for each rank, its tensors' names, slices and digests."""
    differing = differing_copies(rows)
    if not differing:
        return
    (name, _), groups = next(iter(differing.items()))
    most = max(groups, key=len)  # the first of the largest groups
    outliers = sorted(rank for group in groups if group is not most for rank in group)
    holds = "holds" if len(outliers) == 1 else "hold"
    more = and_more({name for name, _ in differing}, phrase=" (and {} more)")
    raise DivergenceError(
        f"{when}: {numbered('rank', outliers, 8)} {holds} other values than rank {most[0]} in '{name}'{more}. Every "
        f"rank must start from equal weights and take equal updates. {cause}"
    )


def differing_copies(rows: Sequence[Sequence[Sequence[Any]]]) -> dict[tuple[str, int], list[list[int]]]:
    """By name and slice of each tensor whose copies differ: the groups of ranks that hold the same bits. `rows`: for
    each rank, [name, slice, digest …] of its tensors."""
    ranks_by_digest: dict[tuple[str, int], dict[tuple[Any, ...], list[int]]] = {}
    for rank, row in enumerate(rows):
        for name, slice_index, *digest in row:
            ranks_by_digest.setdefault((name, slice_index), {}).setdefault(tuple(digest), []).append(rank)
    return {copy: [*groups.values()] for copy, groups in ranks_by_digest.items() if len(groups) > 1}


def check_gradients(missing: list[str], mesh: Mesh, unused: frozenset[str] | None) -> frozenset[str]:
    """Raises DivergenceError for a parameter that has a gradient on some ranks only. Returns the parameters without a
    gradient on any rank in the first update, which stay unchanged on all ranks, as on one process.

    Call it after a backward with the names of parameters `missing` a gradient on this rank. paddle.DataParallel
    silently leaves a parameter without a gradient in the first update out of the exchange, and the ranks drift apart.
    One without a gradient later blocks its bucket and all later ones, so that ranks with the gradient wait in backward
    (seen with 3.3.1). After the first update, when `unused` is None, the check is collective; later each rank checks
    locally.
    """
    absent = mesh.gather(missing) if unused is None else []
    if unused is None:
        unused = frozenset(absent[0]).intersection(*absent[1:])
    else:
        absent = [missing if rank == mesh.rank else [] for rank in range(mesh.ranks)]
    lacking = {name: rank for rank, names in enumerate(absent) for name in names if name not in unused}
    if lacking:
        name = min(lacking)
        ranks = ", ".join(str(rank) for rank, names in enumerate(absent) if name in names)
        raise DivergenceError(
            f"parameter '{name}' got no gradient on rank {ranks}, so it would not be exchanged and the ranks would "
            "silently drift apart. Set strategy.find_unused_parameters=true, or freeze the parameter (stop_gradient), "
            "or use it on every rank."
        )
    return unused
