"""Where randomness starts: one seed for what must be equal on all ranks, one of its own for what must differ."""

from __future__ import annotations

import zlib

from paddle_dp.mesh.mesh import Mesh


def own_seed(seed: int, reader: int) -> int:
    """A seed for one reader's dropout: a pure function of both, far from its neighbours'."""
    return zlib.crc32(f"{seed}/{reader}".encode())


def part_ways(seed: int, mesh: Mesh) -> None:
    """Gives every reader its own random stream; call it when the equal things (initial weights) have been drawn.

    Ranks that work on the same samples draw the same dropout masks: what they hold in common must stay common.
    """
    import paddle

    paddle.seed(own_seed(seed, mesh.reader))
