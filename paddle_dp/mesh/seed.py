"""Seeds: equal on ranks that must draw the same numbers, different on all others."""

from __future__ import annotations

import zlib

from paddle_dp.mesh.mesh import Mesh


def stream_seed(seed: int, name: int | str) -> int:
    """Returns a seed for the random stream `name`, a pure function of both; similar names give unrelated seeds."""
    return zlib.crc32(f"{seed}/{name}".encode())


def seed_ranks(seed: int, mesh: Mesh) -> None:
    """Seeds every rank's random streams; call it after the draws that must be equal everywhere (initial weights).

    Paddle's default stream is the same on all ranks of a tensor axis, which hold the same activations and must drop the
    same elements; it differs between readers, stages and sequence shards. Tensor-parallel layers draw from fleet's
    tracker (get_rng_state_tracker), with a different stream on every rank.
    """
    import paddle

    tensor = mesh.axes.tensor
    if tensor > 1:
        from paddle.distributed.fleet.layers.mpu.random import MODEL_PARALLEL_RNG
        from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

        # Like fleet's model_parallel_random_seed, but that has equal seeds for all readers and all sequence shards.
        tracker = get_rng_state_tracker()
        tracker.reset()
        tracker.add(MODEL_PARALLEL_RNG, stream_seed(seed, f"rank {mesh.rank}"))
    paddle.seed(stream_seed(seed, mesh.rank // tensor))
