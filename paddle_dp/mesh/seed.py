"""Where randomness starts: one seed for what must be equal on all ranks, one of its own for what must differ."""

from __future__ import annotations

import zlib

from paddle_dp.mesh.mesh import Mesh


def own_seed(seed: int, rank: int) -> int:
    """A seed for one rank's dropout: a pure function of both, far from its neighbours'."""
    return zlib.crc32(f"{seed}/{rank}".encode())


def part_ways(seed: int, mesh: Mesh) -> None:
    """Gives every rank its own random stream; call it when the equal things (initial weights) have been drawn."""
    import paddle

    paddle.seed(own_seed(seed, mesh.rank))
