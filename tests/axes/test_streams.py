"""Dropout that is not exact: the ranks of a tensor axis draw alike for whole activations, and apart for cut ones."""

from types import SimpleNamespace

import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel import get_rng_state_tracker

from paddle_dp.axes.tensor.layers import TensorParallelizer
from paddle_dp.axes.tensor.rng import draw_slice
from paddle_dp.core.dropout.uncaught import DrawMonitor, doubt
from paddle_dp.core.placement import Placements
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.mesh.mesh import seed_ranks
from tests.parity import assert_same_weights, train
from tests.ranks import run_ranks


@pytest.fixture(autouse=True)
def as_before():
    yield
    get_rng_state_tracker().reset()


class Drops(nn.Layer):
    """Three places to drop at: on heads inside attention, on cut columns, and on what is whole."""

    cuts = {"on_columns": "colwise", "again": "heads"}  # noqa: RUF012
    attention_methods = ("_attend",)

    def __init__(self):
        super().__init__()
        self.on_columns, self.again, self.on_whole = (nn.Dropout(0.5) for _ in range(3))

    def _attend(self, x):
        return F.dropout(x, 0.5)

    def forward(self, x):
        return [self._attend(x), self.on_columns(x), self.again(x), self.on_whole(x)]


def masks(rank):
    layer = Drops()
    assert TensorParallelizer(SimpleNamespace(rank=rank, nranks=2), Placements()).replace(layer)
    seed_ranks(3, Mesh(rank=rank, ranks=2, degrees=Degrees(tensor=2)))
    return [(out == 0).tolist() for out in layer(paddle.ones([64]))]


def test_masks_of_what_is_cut_differ_and_those_of_what_is_whole_do_not():
    first, second = masks(0), masks(1)
    assert [one == other for one, other in zip(first, second, strict=True)] == [False, False, False, True]


def test_one_process_draws_everything_from_one_stream():
    layer = Drops()
    paddle.seed(3)
    drawn = [out.tolist() for out in layer(paddle.ones([64]))]
    paddle.seed(3)
    assert drawn == [F.dropout(paddle.ones([64]), 0.5).tolist() for _ in range(4)]


class Stretched(nn.Layer):
    """A block in a rank's own stream, whose layers draw nothing, or drop."""

    def __init__(self, p):
        super().__init__()
        self.first, self.drop = nn.Linear(4, 4), nn.Dropout(p)

    def forward(self, x):
        return self.drop(self.first(x))


@pytest.mark.parametrize(("p", "said"), [(0.0, set()), (0.5, {"drop (Dropout)"})])
def test_another_stream_is_no_draw(p, said):
    seed_ranks(3, Mesh(rank=0, ranks=2, degrees=Degrees(tensor=2)))
    block, watch = Stretched(p), DrawMonitor()
    draw_slice(block, "tokens", SimpleNamespace(rank=0, nranks=2), "forward")
    with watch.on(list(block.named_sublayers(include_self=True))):
        block(paddle.ones([2, 4]))
    assert set(watch.kinds_by_layer) == said


def run(folder, until, resume, strategy, ranks=2):
    how = {"model": "gpt, dropout: 0.3", "dropout": "own"}
    return run_ranks(train, ranks, str(folder), strategy, until, resume, timeout=400, **how)[0]


@pytest.mark.long
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(tmp_path):
    strategy = "{use: hybrid, tensor: 2, sequence_parallel: true, recompute: full}"
    whole = run(tmp_path / "whole", "6 steps", False, strategy)
    parts = run(tmp_path / "parts", "3 steps", False, strategy)["rows"]
    last = run(tmp_path / "parts", "6 steps", True, strategy)
    assert parts + last["rows"] == whole["rows"]
    assert_same_weights(last["saved"], whole["saved"])


@pytest.mark.long
def test_another_layout_of_as_many_ranks_draws_its_own(tmp_path):
    """Two readers' streams would be two masks for one activation on two tensor ranks: fit's last check says so."""
    run(tmp_path / "run", "3 steps", False, "{use: data_parallel}")
    assert len(run(tmp_path / "run", "6 steps", True, "{use: hybrid, tensor: 2}")["rows"]) == 3


def test_a_watch_within_another_gives_it_back():
    outer, inner = DrawMonitor(), DrawMonitor()
    with outer.on([]):
        with inner.on([]):
            doubt(paddle.ones([3, 2]), 2)
        doubt(paddle.ones([5, 2]), 2)
    doubt(paddle.ones([7, 2]), 2)
    assert [[*watch.doubted.values()] for watch in (inner, outer)] == [[([3, 2], 2)], [([5, 2], 2)]]
