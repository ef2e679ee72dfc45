"""Placements: in every layout, the main replicas have each number of a model between them exactly once."""

import numpy as np
import paddle
import pytest

from paddle_dp.checkpoint.optimizer import count_kinds
from paddle_dp.core.placement import Placement, Placements, Shard
from paddle_dp.mesh.degrees import Degrees

LAYOUTS = [
    Degrees(),
    Degrees(data=3),
    Degrees(tensor=2, data=2),
    Degrees(tensor=4),
    Degrees(sharding=2, tensor=2),
    Degrees(sequence=2, data=2, sharding=2),
    Degrees(data=2, pipeline=2, sharding=2, sequence=2, tensor=2),
]
WHOLE = (4, 8)


def on(at, degrees, cut, owned):
    """The placement of a tensor on one rank: cut along a dim over tensor, owned by the last rank of sharding."""
    shard = Shard(cut, at["tensor"], degrees.tensor) if cut is not None else None
    owner = degrees.sharding - 1 if owned else None
    return Placement(shard=shard, owner=owner, stored_by_owner=owned)


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
@pytest.mark.parametrize("cut", [None, 0, 1])
@pytest.mark.parametrize("owned", [False, True])
def test_main_replicas_hold_each_number_once(degrees, cut, owned):
    """On every stage, that is: each has tensors of its own."""
    times = np.zeros((degrees.pipeline, *WHOLE), int)
    updated = times.copy()
    for rank in range(degrees.ranks):
        at = degrees.coords(rank)
        placement = on(at, degrees, cut, owned)
        local = tuple(n // degrees.tensor if dim == cut else n for dim, n in enumerate(WHOLE))
        assert placement.global_shape(local) == WHOLE
        start = placement.offset(local)
        here = (at["pipeline"], *(slice(a, a + n) for a, n in zip(start, local, strict=True)))
        if placement.is_main_replica(at):
            assert placement.is_stored_at(at) and placement.is_updated_at(at)
            times[here] += 1
        updated[here] += placement.is_updated_at(at)
    assert (times == 1).all()
    copies = degrees.data * degrees.sequence
    copies *= (1 if owned else degrees.sharding) * (1 if cut is not None else degrees.tensor)
    assert (updated == copies).all()


def test_a_slice_is_what_shape_and_offset_say():
    whole = paddle.arange(32, dtype="float32").reshape(WHOLE)
    for dim, rank in ((0, 1), (1, 0), (1, 3)):
        shard = Shard(dim, rank, 4)
        local, placement = shard.cut(whole), Placement(shard=shard)
        start, shape = placement.offset(local.shape), tuple(local.shape)
        box = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
        np.testing.assert_array_equal(local.numpy(), whole.numpy()[box])
        assert placement.global_shape(shape) == WHOLE
        assert placement.slice_index == rank


def test_of_a_tied_weight_the_first_copy_counts():
    at = Degrees(pipeline=2).coords(1)
    assert not Placement(first_copy=False).is_main_replica(at)
    assert Placement(first_copy=True).is_main_replica(at)


def test_axes_write_down_one_field_each():
    placements, tensor, other = Placements(), paddle.zeros([2, 8]), paddle.zeros([2, 8])
    placements.record(tensor, shard=Shard(1, 0, 2))
    placements.record(tensor, owner=1, stored_by_owner=True)
    assert placements.placement_of(tensor) == Placement(shard=Shard(1, 0, 2), owner=1, stored_by_owner=True)
    assert placements.placement_of(other) == Placement()  # equal, and not it


def test_a_count_is_no_slice_also_where_the_slice_of_a_parameter_is_one_number():
    placements, weight, bias = Placements(), paddle.zeros([2, 4]), paddle.zeros([1])
    placements.record(weight, shard=Shard(1, 1, 2), owner=1)
    placements.record(bias, shard=Shard(0, 1, 2), owner=1)
    states = [(kind, p) for p in (bias, weight) for kind in ("moment", "count")]
    shapes = {"moment": lambda p: p.shape, "count": lambda p: [1]}
    bias_moment, bias_count, moment, count = placements.state_placements(
        [(kind, paddle.ones(shapes[kind](p)), p) for kind, p in states], set
    )
    assert (moment.offset([2, 4]), bias_moment.offset([1])) == ((0, 4), (1,))
    assert bias_count == count
    (steps,) = placements.state_placements([("steps", paddle.ones([3, 2, 4]), weight)], set)
    assert (steps.offset([3, 2, 4]), steps.global_shape([3, 2, 4])) == ((0, 0, 4), (3, 2, 8))
    assert (count.slice_index, count.offset([1]), count.global_shape([1]), count.owner) == (-1, (0,), (1,), 1)


@pytest.mark.parametrize("optimizer", ["AdamW", "ASGD"])
def test_a_count_is_no_slice_also_where_each_slice_of_this_rank_is_one_number(optimizer):
    """A rank that updates one bias of a cut layer, such as in BitFit, or as its owner."""
    settings = {"batch_num": 1} if optimizer == "ASGD" else {}
    placements, bias = Placements(), paddle.create_parameter([1], "float32")
    placements.record(bias, shard=Shard(0, 1, 2))
    made = getattr(paddle.optimizer, optimizer)(0.1, parameters=[bias], **settings)
    bias.sum().backward()
    made.step()
    states = [
        (kind, tensor, bias) for kind, by_name in made._accumulators.items() for tensor in by_name.values()
    ]
    kinds = [kind for kind, _, _ in states]
    sliced = [
        placement.shard is not None
        for placement in placements.state_placements(states, lambda: count_kinds(made))
    ]
    slices = {"AdamW": {"moment1", "moment2"}, "ASGD": {"d", "y"}}[optimizer]
    assert {kind for kind, is_slice in zip(kinds, sliced, strict=True) if is_slice} == slices
    assert all(len(by_name) == 1 for by_name in made._accumulators.values()), "the trial left a state"


def test_counting_kinds_leaves_the_optimizers_list_of_names_alone() -> None:
    """It grew with each checkpoint: a copy of the optimizer shares it."""
    adam = paddle.optimizer.Adam(parameters=paddle.nn.Linear(2, 2).parameters())
    assert "beta1_pow_acc" in " ".join(count_kinds(adam)) and not adam._opti_name_list
