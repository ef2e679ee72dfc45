"""Where randomness starts: one seed for what must be equal on all ranks, one of its own for what must differ."""

from __future__ import annotations

import zlib

from paddle_dp.mesh.mesh import Mesh


def own_seed(seed: int, name: int | str) -> int:
    """A seed for one stream of random numbers: a pure function of both, far from its neighbours'."""
    return zlib.crc32(f"{seed}/{name}".encode())


def seed_ranks(seed: int, mesh: Mesh) -> None:
    """Gives every rank its random streams; call it when the equal things (initial weights) have been drawn.

    Paddle's own stream is one for all ranks of a tensor axis, which hold the same activations and must drop the same of
    them; readers, stages and shards of a sequence hold others. What is cut over the tensor axis draws from fleet's
    tracker (get_rng_state_tracker), whose stream every rank has for itself.
    """
    import paddle

    tensor = mesh.axes.tensor
    if tensor > 1:
        from paddle.distributed.fleet.layers.mpu.random import MODEL_PARALLEL_RNG
        from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

        # As fleet's model_parallel_random_seed, whose seeds are the same for every reader and every sequence shard.
        tracker = get_rng_state_tracker()
        tracker.reset()
        tracker.add(MODEL_PARALLEL_RNG, own_seed(seed, f"rank {mesh.rank}"))
    paddle.seed(own_seed(seed, mesh.rank // tensor))
