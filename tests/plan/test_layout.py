"""Who holds which weights, and how many bytes: by hand for a small model."""

from dataclasses import replace

import pytest

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.exchange import sent
from paddle_dp.plan.layout import Layout, Weight, rank_memories, total_parameters
from paddle_dp.plan.memory import Widths
from paddle_dp.strategies._rounds import AveragedLayout
from paddle_dp.strategies.data_parallel import CompressedLayout
from paddle_dp.strategies.parameter_server import ServerLayout
from paddle_dp.strategies.replicas import CopiesLayout
from paddle_dp.units import Compress

BLOCK = [("up", 80, True), ("down", 80, True), ("norm", 10, False)]
MODEL = [
    [Weight(name="words", size=100, cut=True), Weight(name="places", size=20)],
    *([Weight(name=f"{n}.{name}", size=size, cut=cut) for name, size, cut in BLOCK] for n in range(4)),
    [Weight(name="norm", size=10), Weight(name="words", size=100, cut=True)],  # tied
]


def held(**how):
    degrees = Degrees(**{axis: how.pop(axis) for axis in list(how) if axis in Degrees().as_dict()})
    return [Layout(degrees=degrees, **how).memory(MODEL, rank) for rank in range(degrees.ranks)]


def test_a_shared_weight_counts_once_in_the_model_and_on_each_stage_that_has_it():
    assert total_parameters(MODEL) == 100 + 20 + 4 * 170 + 10
    first, last = held(pipeline=2)
    assert (first.parameters, last.parameters) == (120 + 2 * 170, 2 * 170 + 110)


def test_only_what_is_cut_gets_smaller_over_the_tensor_axis():
    assert {one.parameters for one in held(tensor=2)} == {50 + 20 + 4 * 90 + 10}


def test_a_rank_with_several_stages_holds_runs_of_blocks():
    first, last = held(pipeline=2, virtual_stages=2, partition=(1, 2, 1, 2))
    assert (first.stages, last.stages) == (((0,), (3,)), ((1, 2), (4, 5)))
    assert first.blocks == (0, 3)


@pytest.mark.parametrize(("stage", "kept"), [(1, (1, 1, 0)), (2, (1, 0, 0)), (3, (0, 0, 0))])
def test_sharding_takes_away_what_its_stage_says(stage, kept):
    widths = Widths(parameter=2, gradient=2, optimizer=12)
    seats = held(sharding=2, sharding_stage=stage, widths=widths)
    sums = [
        sum(getattr(one.state, name) for one in seats) for name in ("parameters", "gradients", "optimizer")
    ]
    wanted = [810 * width * (2 if stays else 1) for width, stays in zip((2, 2, 12), kept, strict=True)]
    assert sums == wanted


def test_stage_3_has_the_layers_at_work_and_those_under_way_besides():
    ahead, needed = (held(sharding=2, sharding_stage=3, prefetch=prefetch) for prefetch in (1, 0))
    assert all(one.transient == 0 for one in held(sharding=2, sharding_stage=2))
    assert [one.transient for one in needed] == [
        4 * 160,
        4 * 120,
    ]  # the first block's matrices; words and places
    assert all(0 < few.transient < many.transient < 4 * 810 for few, many in zip(needed, ahead, strict=True))
    copied = held(sharding=2, sharding_stage=3, accelerator=True)
    assert all(few.transient < many.transient for few, many in zip(ahead, copied, strict=True))
    assert held(sharding=2, sharding_stage=3, accelerator=True, prefetch=0) == needed


def test_one_of_each_kind_stands_for_all():
    degrees = Degrees(data=2, pipeline=2, sharding=2, tensor=2)
    found = rank_memories(MODEL, Layout(degrees=degrees))
    assert [one.rank for one in found] == [
        degrees.rank({"pipeline": p, "sharding": s}) for p in (0, 1) for s in (0, 1)
    ]
    everyone = [Layout(degrees=degrees).memory(MODEL, rank) for rank in range(16)]
    assert {(one.parameters, one.state) for one in everyone} == {(one.parameters, one.state) for one in found}


def test_stage_3_shards_what_is_frozen_and_leaves_statistics_everywhere():
    body = [
        Weight(name="a.w", size=100, frozen=True),
        Weight(name="a.m", size=10, frozen=True, statistic=True),
    ]
    blocks = [body, [Weight(name="b.w", size=60)]]
    layout = Layout(degrees=Degrees(sharding=2), sharding_stage=3, prefetch=0)
    first, second = rank_memories(blocks, layout)
    assert (first.state.parameters, second.state.parameters) == (4 * 70, 4 * 110)
    assert (first.state.gradients, second.state.gradients, second.state.optimizer) == (4 * 60, 0, 0)
    assert (first.transient, second.transient) == (4 * 100, 4 * 60)
    moved = {(s.payload, s.when): (s.bytes, s.received_bytes) for s in sent(blocks, layout, 1, 1, None)}
    # Backward ends at the first weight that learns, and fetches nothing before it; what learns is still here when it
    # begins.
    assert moved == {
        ("gradients", "every backward"): (240, 0),
        ("parameters", "every forward"): (400, 240),
    }
    whole = rank_memories(blocks, Layout(degrees=Degrees(sharding=2), sharding_stage=2))
    assert [memory.state.parameters for memory in whole] == [4 * 170] * 2


FROZEN = [[Weight(name="a", size=100, frozen=True)], [Weight(name="b", size=60, shape=(6, 10))]]


def test_copies_and_errors_are_of_what_is_trained():
    widths = Widths(parameter=4, gradient=4, optimizer=8)
    copied = AveragedLayout(degrees=Degrees(data=2), every=8, copies=2.5, widths=widths).memory(FROZEN, 0)
    assert copied.extra == 2.5 * 4 * 60
    assert copied.total == 4 * 160 + 4 * 60 + 8 * 60 + 2.5 * 4 * 60
    low = Widths(parameter=2, gradient=2, optimizer=12)
    compressed = CompressedLayout(degrees=Degrees(data=2), compress=Compress.parse("bfloat16"), widths=low)
    assert compressed.memory(FROZEN, 0).extra == 2 * 4 * 60


def test_paddle_s_reducer_is_that_of_accelerators():
    layout = Layout(degrees=Degrees(data=2), exchange="auto", bucket=40.0)
    assert layout.memory(FROZEN, 0).extra == 0
    assert replace(layout, accelerator=True).memory(FROZEN, 0).extra == 4 * 60 + 40
    assert replace(layout, exchange="bucketed").memory(FROZEN, 0).extra == 4 * 60 + 40


def test_sums_that_came_rounded_lie_beside_their_gradients_on_accelerators():
    layout = Layout(degrees=Degrees(data=2), reduce_dtype="bfloat16")
    there = replace(layout, accelerator=True)
    found = (
        layout,
        there,
        replace(there, reduce_dtype="float32"),
        replace(there, widths=Widths.for_states(0, double=True)),
    )
    assert [each.memory(FROZEN, 0).extra for each in found] == [0, 2 * 60, 0, 0]
    assert replace(there, degrees=Degrees(sharding=2)).memory(FROZEN, 0).extra == 0


def test_replicas_are_in_one_memory_or_on_a_device_each():
    """Weights, the frozen ones too, and gradients of each; the optimizer's states once."""
    layout = CopiesLayout(degrees=Degrees(), count=3, separate_devices=True)
    for here, times in ((layout, 3), (replace(layout, accelerator=True), 1)):
        state = here.memory(FROZEN, 0).state
        assert (state.parameters, state.gradients, state.optimizer) == (
            times * 4 * 160,
            times * 4 * 60,
            8 * 60,
        )
    assert replace(layout, accelerator=True, separate_devices=False).devices == 1
    assert replace(layout, accelerator=True).devices == 3


@pytest.mark.parametrize(("asynchronous", "parts"), [(False, 2), (True, 5)])
def test_a_server_has_what_three_workers_send_and_a_worker_no_more_than_its_gradients(asynchronous, parts):
    layout = ServerLayout(degrees=Degrees(data=3, servers=2), asynchronous=asynchronous)
    first, second, worker = rank_memories(MODEL, layout)
    own = [first.trained, second.trained]
    assert [first.transient, second.transient] == [parts * 4 * size for size in own] and sum(own) == 810
    assert worker.transient == 0 and worker.total == 2 * 4 * 810
    with pytest.raises(AssertionError, match="rank 0 is on no axis"):
        Layout(degrees=Degrees(data=3, servers=2)).memory(MODEL, 0)
