"""Random streams: equal where ranks hold the same, different where they do not."""

from itertools import combinations

import paddle
import pytest
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.mesh.mesh import seed_ranks, stream_seed

SPLIT = Degrees(data=2, pipeline=2, sequence=2, tensor=2)


@pytest.fixture(autouse=True)
def as_before():
    yield
    get_rng_state_tracker().reset()


def streams(rank, degrees, seed=3):
    """The first numbers of a rank's common stream, and of its own."""
    seed_ranks(seed, Mesh(rank=rank, ranks=degrees.ranks, degrees=degrees))
    common = tuple(paddle.rand([4]).tolist())
    with get_rng_state_tracker().rng_state():
        return common, tuple(paddle.rand([4]).tolist())


def test_tensor_ranks_share_one_stream_and_have_one_each():
    found = [streams(rank, SPLIT) for rank in range(SPLIT.ranks)]
    for one, other in combinations(range(SPLIT.ranks), 2):
        together = other in SPLIT.group(one, "tensor")
        assert (found[one][0] == found[other][0]) is together
    assert len({own for _, own in found}) == SPLIT.ranks
    assert not {own for _, own in found} & {common for common, _ in found}


def test_streams_are_of_the_seed_and_the_rank_alone():
    assert streams(5, SPLIT) == streams(5, SPLIT)
    assert all(one != other for one, other in zip(streams(5, SPLIT), streams(5, SPLIT, seed=4), strict=True))


def test_drawing_from_one_stream_leaves_the_other_alone():
    common, own = streams(0, SPLIT)
    seed_ranks(3, Mesh(ranks=SPLIT.ranks, degrees=SPLIT))
    with get_rng_state_tracker().rng_state():
        first = tuple(paddle.rand([4]).tolist())
    assert (tuple(paddle.rand([4]).tolist()), first) == (common, own)


def test_data_parallel_ranks_draw_as_before():
    degrees = Degrees(data=4)
    for rank in range(4):
        seed_ranks(7, Mesh(rank=rank, ranks=4, degrees=degrees))
        drawn = paddle.rand([2]).tolist()
        paddle.seed(stream_seed(7, rank))
        assert drawn == paddle.rand([2]).tolist()
