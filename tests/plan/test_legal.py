"""Illegal layouts get one sentence with legal neighbours, before any process starts."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan import Anatomy, Shape, layout_error, legal_layouts, problems

SIX = Anatomy(blocks=6, cut=(("qkv", 384),), attention_methods=True)
GPT = Shape(heads=4, hidden=512, vocab=256, length=128, anatomy=SIX, batch=32, micro_batches=2)


@pytest.mark.parametrize(
    ("degrees", "ranks", "said"),
    [
        ({"tensor": 2}, 4, "the degrees make 2 ranks, and there are 4"),
        ({"tensor": 3, "data": 2}, 6, r"tensor 3 does not divide the model's heads \(4\)"),
        ({"sequence": 3}, 3, r"sequence 3 does not divide the model's heads \(4\); .* the length \(128\)"),
        ({"sequence": 4, "tensor": 4}, 16, r"sequence 4 × tensor 4 does not divide the model's heads \(4\)"),
        ({"pipeline": 8}, 8, "8 pipeline stages need as many blocks, and the model has 6"),
    ],
)
def test_each_reason_is_one_sentence_with_neighbours(degrees, ranks, said):
    sentence = layout_error(Degrees(**degrees), GPT, ranks)
    assert sentence is not None
    assert re.search(said, sentence), sentence
    assert f"Legal on {ranks} ranks, nearest first:" in sentence


@pytest.mark.parametrize(
    ("degrees", "shape", "ranks", "is_refused"),
    [
        ({"data": 2, "tensor": 2, "pipeline": 2}, GPT, 8, False),
        # A model that cannot be built without memory has no anatomy: its ranks build it, and say what it lacks.
        ({"pipeline": 2, "tensor": 2}, Shape(batch=4), 4, False),
        ({"pipeline": 7}, Shape(batch=0, anatomy=Anatomy(blocks=1)), 0, True),  # where nothing fits
    ],
)
def test_a_legal_layout_is_not_refused(degrees, shape, ranks, is_refused):
    assert (layout_error(Degrees(**degrees), shape, ranks) is not None) == is_refused


def test_neighbours_are_legal_and_near():
    near = legal_layouts(GPT, 6, Degrees(tensor=3, data=2))
    assert near
    assert all(not problems(layout, GPT, 6) for layout in near)
    assert str(near[0]) == "data 3 × tensor 2"


def test_without_blocks_there_is_no_pipeline():
    nothing = Shape(batch=4, anatomy=Anatomy())
    assert "ordered `blocks`" in " ".join(problems(Degrees(pipeline=2), nothing, 2))
    outside = Shape(anatomy=Anatomy(blocks=2, outside="head.bias"))
    assert "all of a model in its `blocks`, and 'head.bias'" in " ".join(
        problems(Degrees(pipeline=2), outside, 2)
    )


def test_a_model_without_tables_is_never_proposed_what_needs_them():
    said = layout_error(Degrees(pipeline=2), Shape(batch=4, anatomy=Anatomy()), 2)
    assert said is not None and said.endswith("Legal on 2 ranks, nearest first: data 2; sharding 2.")
    chained = Shape(batch=4, anatomy=Anatomy(blocks=3))
    assert {str(layout) for layout in legal_layouts(chained, 2)} == {"data 2", "sharding 2", "pipeline 2"}


def test_the_tensor_axis_divides_what_the_tables_name():
    model = Anatomy(cut=(("layers.0.linear1", 30), ("layers.0.self_attn.num_heads", 4)))
    (said,) = problems(Degrees(tensor=4), Shape(anatomy=model), 4)
    assert said == "tensor 4 does not divide layers.0.linear1 (30)"
    (said,) = problems(Degrees(tensor=3), Shape(anatomy=model), 3)
    assert said == "tensor 3 does not divide layers.0.self_attn.num_heads (4)"


@pytest.mark.parametrize("degrees", [Degrees(tensor=2), Degrees(sequence=2)])
def test_a_loss_that_has_no_parts_wants_whole_scores(degrees):
    model = Anatomy(blocks=3, cut=(("head", 4),), cut_classes=True, attention_methods=True)
    assert problems(degrees, Shape(length=4, anatomy=model, partial_loss=False), 2)
    assert not problems(degrees, Shape(length=4, anatomy=model), 2)


def test_interleaved_stages_want_whole_rounds_of_micros():
    shape = Shape(anatomy=Anatomy(blocks=8), batch=12, micro_batches=3, virtual_stages=2)
    assert "multiple of pipeline 2" in " ".join(problems(Degrees(pipeline=2), shape, 2))


@pytest.mark.parametrize(
    ("degrees", "length", "along", "said"),
    [
        ({"sequence": 4}, 30, False, ["sequence 4 does not divide the length (30)"]),
        ({"sequence": 4}, None, False, []),
        ({"tensor": 4}, 6, False, []),
        ({"tensor": 4}, 6, True, ["tensor 4 does not divide the length (6), which sequence_parallel cuts"]),
    ],
)
def test_sequences_are_those_of_the_data_set_when_it_names_a_length(degrees, length, along, said):
    texts = SimpleNamespace(length=length) if length else object()
    assert problems(Degrees(**degrees), GPT.along(texts, along), 4) == said


def test_heads_of_keys_are_traded_too():
    shape = replace(GPT, kv_heads=2)
    (said,) = problems(Degrees(sequence=2, tensor=2), shape, 4)
    assert said == "sequence 2 × tensor 2 does not divide the model's kv_heads (2)"


def test_no_length_no_sequence():
    assert "needs a model or a data set with a `length`" in " ".join(
        problems(Degrees(sequence=2), Shape(), 2)
    )


def test_a_weight_that_two_stages_share_is_not_sharded():
    both = Degrees(pipeline=2, sharding=2)
    shape = Shape(anatomy=Anatomy(blocks=4, tied=((0, 3),)))
    assert "share (tied)" in " ".join(problems(both, shape, 4))
    assert all(layout.sharding == 1 or layout.pipeline == 1 for layout in legal_layouts(shape, 4))
    assert not problems(both, Shape(anatomy=Anatomy(blocks=4, tied=((0, 1),))), 4)


def test_a_stage_in_which_nothing_learns_is_refused():
    shape = Shape(anatomy=Anatomy(blocks=4, sizes=(0, 5, 0, 5), learns=(0, 2, 0, 2)), partition=(1, 3))
    (said,) = problems(Degrees(pipeline=2), shape, 2)
    assert said == (
        "stage 0 of the pipeline would hold nothing that learns (block 0): set strategy.partition to parameters, or to "
        "a list"
    )
    assert not problems(Degrees(pipeline=2), replace(shape, partition="parameters"), 2)


def test_a_rank_of_the_sharding_axis_may_own_nothing():
    shape = Shape(anatomy=Anatomy(blocks=2, learns=(3, 2)))
    assert not problems(Degrees(sharding=6), shape, 6)
    assert not problems(Degrees(pipeline=2, sharding=3), shape, 6)
