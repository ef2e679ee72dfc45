"""Bytes a rank sends are those of the papers, for each axis alone and for mixtures."""

from dataclasses import replace

import pytest

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.exchange import Between, mean_bytes, sent
from paddle_dp.plan.layout import Layout, Weight
from paddle_dp.plan.memory import Widths
from paddle_dp.strategies._rounds import AveragedLayout
from paddle_dp.strategies.parameter_server import ServerLayout
from paddle_dp.units import Recompute

# An embedding, four blocks of 1000 numbers, half of which the tensor axis cuts, and a head.
BLOCKS = [
    [Weight(name="token", size=400, cut=True)],
    *([Weight(name=f"a{n}", size=500, cut=True), Weight(name=f"b{n}", size=500)] for n in range(4)),
    [Weight(name="out", size=400, cut=True)],
]
PSI = 4 * 4800  # bytes
ACTIVATIONS = Between(numbers=2 * 8 * 16)
A = 4 * 256  # bytes


def layout(recompute="none", stage=1, sequence_parallel=False, virtual_stages=1, prefetch=1, **degrees):
    return Layout(
        prefetch=prefetch,
        degrees=Degrees(**degrees), sharding_stage=stage, sequence_parallel=sequence_parallel,
        virtual_stages=virtual_stages, recompute=Recompute.parse(recompute),
    )  # fmt: skip


def of(micro_batches=1, between=ACTIVATIONS, **words):
    return mean_bytes(BLOCKS, layout(**words), micro_batches, between)


@pytest.mark.parametrize("n", [2, 4])
def test_gradients_travel_as_in_a_ring_and_in_zero(n):
    part = (n - 1) / n * PSI
    assert of(data=n) == pytest.approx(2 * part)
    assert of(sharding=n) == pytest.approx(2 * part)
    assert of(sharding=n, stage=2) == pytest.approx(2 * part)
    assert of(sharding=n, stage=3, prefetch=0) == pytest.approx(3 * part - (n - 1) / n * 4 * 400)


def test_means_of_weights_travel_once_in_so_many_steps():
    part = 3 / 4 * PSI
    often = AveragedLayout(degrees=Degrees(data=4), widths=layout(data=4).widths, every=8)
    assert mean_bytes(BLOCKS, often, 1, ACTIVATIONS) == pytest.approx(2 * part / 8)
    with_states = replace(often, states=True)  # of Adam: twice the weights
    assert mean_bytes(BLOCKS, with_states, 1, ACTIVATIONS) == pytest.approx(3 * 2 * part / 8)
    assert [each.payload for each in sent(BLOCKS, often, 0, 1, None)] == ["parameters"]


def test_nobody_waits_for_a_mean_that_is_made_in_the_background():
    waits, goes_on = (
        AveragedLayout(degrees=Degrees(data=4), every=4, asynchronous=yes) for yes in (False, True)
    )
    assert [one.hides for plan in (waits, goes_on) for one in sent(BLOCKS, plan, 0, 1, None)] == [False, True]
    assert mean_bytes(BLOCKS, waits, 1, None) == mean_bytes(BLOCKS, goes_on, 1, None)
    both = (ServerLayout(degrees=Degrees(data=2, servers=1), asynchronous=yes) for yes in (False, True))
    pushes = [
        sent(BLOCKS, plan, 1, 1, None)[0] for plan in both
    ]  # of a worker: beside its backward, or behind it
    assert [push.bytes for push in pushes] == [PSI, PSI] and [push.hides for push in pushes] == [True, False]


LOW, DOUBLE = Widths.for_states(2, low=True), Widths.for_states(2, double=True)


@pytest.mark.parametrize(
    ("widths", "reduce_dtype", "gradient", "parameter"),
    [
        (Widths(), None, 4, 4), (Widths(), "bfloat16", 2, 4), (Widths(), "float32", 4, 4), (LOW, None, 2, 2),
        (LOW, "bfloat16", 2, 2), (LOW, "float32", 4, 2), (DOUBLE, "bfloat16", 8, 8),
    ],
)  # fmt: skip
def test_gradients_travel_in_the_dtype_that_is_asked_for(widths, reduce_dtype, gradient, parameter):
    """Parameters of ZeRO, and what two stages share, are not rounded."""
    numbers, head = 4800, 400

    def sends(micro_batches=1, **words):
        plan = replace(layout(**words), widths=widths, reduce_dtype=reduce_dtype)
        return mean_bytes(BLOCKS, plan, micro_batches, None)

    assert sends(data=4) == pytest.approx(2 * 3 / 4 * numbers * gradient)
    assert sends(sequence=2) == pytest.approx(numbers * gradient)
    assert sends(sharding=2) == pytest.approx(numbers / 2 * (gradient + parameter))
    assert sends(4, sharding=2, stage=2) == pytest.approx(numbers / 2 * (4 * gradient + parameter))
    fetched = 2 * numbers - head  # the head is still here when backward begins
    assert sends(sharding=2, stage=3, prefetch=0) == pytest.approx(
        (numbers * gradient + fetched * parameter) / 2
    )
    tied = [*BLOCKS[:-1], [Weight(name="token", size=400, cut=True)]]
    shared = replace(layout(pipeline=2), widths=widths, reduce_dtype=reduce_dtype)
    assert mean_bytes(tied, shared, 1, None) == widths.gradient * 400


def test_owners_of_whole_parameters_have_unequal_parts():
    """Of 600 and 300 numbers, one each: who owns 600 sends the other's 300 gradients, and then 600 new parameters."""
    blocks, plan = [[Weight(name="large", size=600), Weight(name="small", size=300)]], layout(sharding=2)
    for rank, (gradients, parameters) in enumerate([(300, 600), (600, 300)]):
        reduced, shared = sent(blocks, plan, rank, 1, None)
        assert (reduced.bytes, reduced.received_bytes) == (4 * gradients, 4 * parameters)
        assert (shared.bytes, shared.received_bytes) == (4 * parameters, 4 * gradients)
    assert mean_bytes(blocks, plan, 1, None) == 4 * 900


def test_with_micro_batches_only_what_is_freed_after_each_is_sent_for_each():
    assert of(4, data=2) == of(data=2)
    assert of(4, sharding=2) == of(sharding=2)
    assert of(4, sharding=2, stage=2) == pytest.approx(5 * PSI / 2)
    # On CPUs each backward's gradients go to the owner's replicas, a part to each; their sums come back once.
    both = PSI / 2 + PSI / 4
    assert of(4, sharding=2, stage=2, data=2) == pytest.approx(4 * both + PSI / 4 + PSI / 2)
    # The head between a forward and its backward, the embedding between this and the next forward.
    held = 4 * 400
    assert of(4, sharding=2, stage=3, prefetch=0) == pytest.approx(12 * PSI / 2 - 7 * held / 2)


@pytest.mark.parametrize("t", [2, 4])
def test_a_cut_block_has_four_all_reduces(t):
    """arXiv:2205.05198, section 4.2.2: and with sequence parallelism the same bytes in other words."""
    assert of(tensor=t) == pytest.approx(2 * (t - 1) / t * A * (4 * 4 + 2))
    assert of(tensor=t, sequence_parallel=True) == of(tensor=t)
    assert of(tensor=t, recompute="full") == pytest.approx(2 * (t - 1) / t * A * (6 * 4 + 2))
    assert of(3, tensor=t) == of(tensor=t)  # in smaller pieces


def test_a_sequence_axis_exchanges_heads_for_tokens_and_all_gradients():
    """arXiv:2309.14509, section 3.2: q, k, v and the output, of 1/n of the tokens each, forward and backward."""
    assert of(sequence=2, between=None) == of(data=2)
    assert of(sequence=4) - of(sequence=4, between=None) == pytest.approx(4 * 8 * A * 3 / 16)
    heads = (
        of(sequence=2, tensor=2) - of(data=2, tensor=2) + of(tensor=2) / 2
    )  # of which a tensor rank has half
    assert heads == pytest.approx(4 * 8 * A / 4 / 2)
    grouped = Between(numbers=256, attention=3.0)
    ratio = (of(sequence=2, between=grouped) - of(sequence=2, between=None)) / (4 * 8 * A / 4)
    assert ratio == pytest.approx(3 / 4)


def test_stages_send_activations_there_and_gradients_back():
    assert of(pipeline=2) == pytest.approx(A)
    assert of(pipeline=4) == pytest.approx(A * (1 + 2 + 2 + 1) / 4)
    assert of(pipeline=2, virtual_stages=2) == pytest.approx(3 * A)
    assert of(pipeline=2, tensor=2, sequence_parallel=True) == pytest.approx(A / 2 + A * (4 * 4 + 2) / 2)


def test_tied_weights_of_two_stages_are_all_reduced():
    tied = [*BLOCKS[:-1], [Weight(name="token", size=400, cut=True)]]
    assert mean_bytes(tied, layout(pipeline=2), 1, None) == 4 * 400


def test_mixtures_add_up():
    """Data ranks exchange what a rank keeps: the tensor axis cuts 2800 of 4800 numbers."""
    kept = 4 * (2000 + 2800 / 2)
    samples_of_one = Between(numbers=128)
    assert of(data=2, tensor=2, between=samples_of_one) == pytest.approx(kept + A / 2 * (4 * 4 + 2))
    assert of(data=2, sharding=2) == pytest.approx(PSI + PSI / 2)
    both = sent(BLOCKS, layout(data=2, sequence=2), 0, 1, None)
    assert sum(each.bytes for each in both) == pytest.approx(2 * 3 / 4 * PSI)
