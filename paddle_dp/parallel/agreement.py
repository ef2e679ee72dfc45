"""Do the ranks still hold the same model? Digests of the bits, compared; and gradients that only some ranks have."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import paddle

from paddle_dp.errors import DivergenceError
from paddle_dp.mesh import Mesh

_AS_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}
_CYCLE = 8191
_RUN = 128 * _CYCLE  # elements at once: the digest of a large tensor must not take a multiple of its memory
Named = Iterable[tuple[str, paddle.Tensor]]


def has_gradient(parameter: paddle.Tensor) -> bool:
    return parameter.grad is not None


def digest(tensor: paddle.Tensor) -> paddle.Tensor:
    """Two int64 sums [2] over the tensor's bits: plain, and weighted by position. Stays on the device.

    Equal bits give equal digests; one changed, or two swapped, elements change them.
    """
    flat = tensor.detach().flatten()
    bits = flat.view(_AS_INTEGERS[flat.element_size()]) if flat.size else flat
    weights = paddle.arange(1, min(bits.size, _RUN) + 1, dtype="int64") % _CYCLE + 1
    found = paddle.zeros([2], "int64")
    for start in range(0, bits.size, _RUN):
        some = bits[start : start + _RUN].astype("int64")
        found += paddle.stack([some.sum(), (some * weights[: some.size]).sum()])
    return found


def check_equal(named: Named, mesh: Mesh, when: str) -> None:
    """Raises DivergenceError, naming tensor and rank, unless ranks that hold the same tensor hold the same bits.

    Collective. Tensors of one name are the same unless they are parts of it: then they are where the tensor seats are.
    """
    if mesh.ranks == 1:
        return
    named = list(named)
    digests = paddle.stack([digest(tensor) for _, tensor in named]).tolist() if named else []
    seat = mesh.seats["tensor"]
    held = [
        [name, seat if hasattr(tensor, "cut") else -1, *sums]
        for (name, tensor), sums in zip(named, digests, strict=True)
    ]
    first: dict[tuple[str, int], tuple[int, list[int]]] = {}
    differing = []
    for rank, rows in enumerate(mesh.gather(held)):
        for name, part, *sums in rows:
            owner, theirs = first.setdefault((name, part), (rank, sums))
            if theirs != sums:
                differing.append((rank, name, owner))
    if differing:
        rank, name, owner = differing[0]
        others = len({name for _, name, _ in differing}) - 1
        raise DivergenceError(
            f"{when}: rank {rank} holds other values than rank {owner} in '{name}'"
            f"{f' (and {others} more)' if others else ''}. Every rank must start "
            "from equal weights and take equal updates. Is a parameter changed, or random, on one rank only? "
            "The newest checkpoint before this is still good."
        )


def check_gradients(
    named: Named, mesh: Mesh, find_unused: bool, had: Callable[[paddle.Tensor], bool] = has_gradient
) -> None:
    """Raises DivergenceError when a parameter's gradient would not be exchanged. Collective; call after a backward.

    paddle.DataParallel without find_unused_parameters says nothing when a parameter has no gradient: the bucket that
    holds it is then never exchanged, and the ranks drift apart (seen with 3.3.1). `had`: whether a parameter got one.
    """
    if mesh.ranks == 1:
        return
    named = list(named)
    absent = mesh.gather([name for name, parameter in named if not had(parameter)])
    lacking = {
        name: [rank for rank, names in enumerate(absent) if name in names] for name in set().union(*absent)
    }
    lacking = {name: ranks for name, ranks in lacking.items() if not find_unused or len(ranks) < mesh.ranks}
    if lacking:
        name, ranks = min(lacking.items())
        who = "any rank" if len(ranks) == mesh.ranks else "rank " + ", ".join(map(str, ranks))
        raise DivergenceError(
            f"parameter '{name}' got no gradient on {who}, so its bucket would not be exchanged and the ranks would "
            "silently drift apart. Set strategy.find_unused=true, or freeze the parameter (stop_gradient), or use it."
        )
