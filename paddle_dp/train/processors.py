"""Finds a processor or a memory that computes wrong: does every rank compute the same from the same numbers?

All data ranks compute the gradients of the same samples, with equal weights, and compare them bit by bit. Google and
Meta report a few such machines in several thousand (Hochschild et al. 2021, "Cores that don't count"; Dixit et al.
2021, arXiv:2102.11245): the loss stays plausible, and all ranks get the wrong gradient.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paddle_dp.batch import Batch
from paddle_dp.checks.repeats import recompute_gradients, shared_batch
from paddle_dp.errors import ProcessorError
from paddle_dp.learner import Learner
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import MODEL_AXES, Degrees
from paddle_dp.text import and_more, numbered

Digests = Mapping[str, Sequence[int]]
"""The digests of a rank's gradients, by parameter."""


@dataclass(frozen=True)
class ProcessorFault:
    """The `parameters` whose gradients differ. `ranks`: the wrong ranks if `is_certain`, else ranks of which some are
    wrong. `is_repeated`: whether they computed the same bits the second time."""

    ranks: tuple[int, ...]
    parameters: tuple[str, ...]
    is_certain: bool
    is_repeated: bool


def check(learner: Learner, batch: Batch, when: str) -> str:
    """Raises ProcessorError, the same on every rank, if ranks compute different gradients from these samples.

    Returns "", or a sentence if ranks do not compute the same twice and cannot be compared. Collective. The training
    is not changed.
    """
    mesh = learner.mesh
    batch = shared_batch(learner, batch)
    first = recompute_gradients(learner, batch)
    if mesh.dp_size > 1 and _agree(first, mesh):
        return ""
    second = recompute_gradients(learner, batch)
    if mesh.dp_size == 1 and not any(mesh.gather(first != second)):
        return ""
    rows = mesh.gather([first, second])
    learner.check(when)  # other weights give other gradients: that is another error
    finding = judge([row[0] for row in rows], [row[1] for row in rows], mesh.axes)
    if finding is None:
        return (
            f"{when}: ranks do not compute the same gradients twice from the same numbers, so guard.recompute cannot "
            "tell a wrong one, and is off from here on. On a GPU, FLAGS_cudnn_deterministic=1 and "
            "FLAGS_embedding_deterministic=1 help."
        )
    raise ProcessorError(f"{when}: {_sentence(finding, mesh.gather(mesh.host), mesh)}")


def _agree(local_digests: Digests, mesh: Mesh) -> bool:
    """True if the digests of all ranks with the same slices are equal; gathers one number per rank. Collective."""
    numbers = mesh.gather(zlib.crc32(repr(sorted(local_digests.items())).encode()))
    return all(len({numbers[rank] for rank in group}) == 1 for group in groups(mesh.axes))


def groups(axes: Degrees) -> list[list[int]]:
    """The ranks that hold the same slices of the model, and read different samples."""
    ranks_by_slice: dict[tuple[int, ...], list[int]] = {}
    for rank in range(axes.ranks):
        coords = axes.coords(rank)
        ranks_by_slice.setdefault(tuple(coords[axis] for axis in MODEL_AXES), []).append(rank)
    return list(ranks_by_slice.values())


def judge(first: Sequence[Digests], second: Sequence[Digests], axes: Degrees) -> ProcessorFault | None:
    """The wrong ranks, by their first and second results. None if several data ranks, half of them or more, do not
    compute the same twice, like kernels that sum in no fixed order."""
    unsteady = [rank for rank in range(axes.ranks) if first[rank] != second[rank]]
    readers = {axes.dp_rank(rank) for rank in unsteady}
    if len(readers) > 1 and 2 * len(readers) >= axes.dp_size:
        return None
    if unsteady:
        names = [name for rank in unsteady for name in _differing(first[rank], second[rank])]
        parameters = tuple(dict.fromkeys(names))
        return ProcessorFault(tuple(unsteady), parameters, is_certain=True, is_repeated=False)
    wrong: set[int] = set()
    names = []
    is_certain = True
    for group in groups(axes):
        bits = {rank: repr(sorted(first[rank].items())) for rank in group}
        (usual, most), *others = Counter(bits.values()).most_common()
        if not others:
            continue
        is_majority = 2 * most > len(group)
        is_certain = is_certain and is_majority
        deviating = [rank for rank in group if bits[rank] != usual]
        reference = next(first[rank] for rank in group if bits[rank] == usual)
        names += [name for rank in deviating for name in _differing(reference, first[rank])]
        wrong |= set(deviating if is_majority else group)
    parameters = tuple(dict.fromkeys(names))
    return ProcessorFault(tuple(sorted(wrong)), parameters, is_certain=is_certain, is_repeated=True)


def _differing(reference: Digests, other: Digests) -> list[str]:
    return [name for name in {**reference, **other} if reference.get(name) != other.get(name)]


def _sentence(finding: ProcessorFault, hosts: Sequence[str], mesh: Mesh) -> str:
    ranks = numbered("rank", (f"{rank} ({hosts[rank]})" for rank in finding.ranks))
    names = f"the gradient of '{finding.parameters[0]}'{and_more(finding.parameters)}"
    do = "Leave that machine out, and resume an earlier checkpoint; weights since the last such check may be wrong."
    if mesh.dp_size == 1 or not finding.is_repeated:
        twice = "computed something else at the second time from the same weights and samples"
        return f"{ranks} {twice}: {names}. Its processor or its memory is at fault, now and then. {do}"
    if not finding.is_certain:
        return (
            f"of {ranks} some compute wrong: from the same weights and samples they get other bits in {names}, twice. "
            f"With three or more data ranks a vote would tell which. {do}"
        )
    return (
        f"{ranks} computed other bits than the other data ranks from the same weights and samples, twice: {names}. Its "
        f"processor or its memory is at fault. {do}"
    )
