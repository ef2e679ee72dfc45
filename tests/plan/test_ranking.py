"""Layouts are ranked by their forecasts, share a rank within the tie, and fit by the arithmetic of `check`."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from paddle_dp.mesh.degrees import Degrees
from paddle_dp.part import read_part
from paddle_dp.plan.activations import LOGIT_PEAK, Tokens
from paddle_dp.plan.candidates import (
    Candidate,
    Numerics,
    candidates,
    depths,
    micro_sizes,
    recompute_choices,
    workload_of,
)
from paddle_dp.plan.devices import DEVICES
from paddle_dp.plan.error_bars import BARS, TIE, bar_class
from paddle_dp.plan.fullest_rank import USABLE_MEMORY, FullestRank
from paddle_dp.plan.layout import Weight, rank_memories
from paddle_dp.plan.legal import Anatomy, Shape, layouts, problems
from paddle_dp.plan.memory import Widths
from paddle_dp.plan.ranking import LayoutRanking, Misfit, Planner, is_foretold
from paddle_dp.plan.step_time import step_time
from paddle_dp.plan.transformer import Transformer, transformer
from paddle_dp.units import Recompute

GPT = Transformer(
    depth=24, width=4096, heads=32, kv_heads=32, head_width=128, hidden=16384, matrices=2, vocab=50304, length=2048,
    tables=2,
)  # fmt: skip
LOW = Numerics(low=True, widths=Widths.for_states(2), flash=True)


def blocks(model: Transformer = GPT) -> list[list[Weight]]:
    """The weights of GPT blocks: q, k and v together, the output, the MLP's two; and the two tables."""
    width, hidden, queries = model.width, model.hidden, model.heads * model.head_width
    shapes = {
        "qkv": (width, 3 * queries),
        "out": (queries, width),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    table = [
        Weight(name=f"{name}.weight", size=round(model.vocab) * width, cut=True) for name in ("token", "head")
    ]
    inner = [
        [Weight(name=f"{n}.{name}", size=a * b, shape=(a, b), cut=True) for name, (a, b) in shapes.items()]
        for n in range(model.depth)
    ]
    return [[table[0]], *inner, [table[1]]]


def shape(**sizes: Any) -> Shape:
    anatomy = Anatomy(blocks=GPT.depth + 2, cut=(("qkv", 3 * 4096),), attention_methods=True)
    return Shape(heads=32, vocab=50304, length=2048, anatomy=anatomy, batch=256, **sizes)


def planner(device: str = "a100-80", **changes: Any) -> Planner:
    return Planner(
        model=GPT, blocks=blocks(), shape=shape(), device=DEVICES[device], numerics=replace(LOW, **changes)
    )


@cache
def ranking(ranks: int, device: str = "a100-80") -> LayoutRanking:
    return planner(device).ranking(ranks)


def test_all_factors_of_the_ranks_are_there_once() -> None:
    found = [*layouts(12)]
    assert (
        len(found) == len({str(d) + str(d.data) for d in found}) == 75
    )  # C(6, 4) · 5 ways to deal 2, 2 and 3
    assert all(d.ranks == 12 for d in found)


def test_every_candidate_is_legal_and_deals_whole_samples() -> None:
    choices = [*candidates(shape(), 16, flash=True)]
    assert len(choices) == len({*choices}) > 1000
    for choice in choices[::37]:
        fitted = shape(
            micro_batches=choice.micro_batches, virtual_stages=choice.virtual_stages,
            pipeline_schedule=choice.schedule, cut_lengths=choice.sequence_parallel,
        )  # fmt: skip
        assert not problems(choice.degrees, fitted, 16)
        assert choice.micro * choice.micro_batches * choice.degrees.dp_size == 256


def test_shared_weights_keep_sharding_out_of_pipelines() -> None:
    assert any(c.degrees.sharding > 1 and c.degrees.pipeline > 1 for c in candidates(shape(), 4, flash=True))
    tied = [*candidates(shape(), 4, flash=True, tied=True)]
    assert tied and not any(c.degrees.sharding > 1 and c.degrees.pipeline > 1 for c in tied)


def test_an_optimizer_of_whole_parameters_keeps_tensors_whole() -> None:
    """`train` refuses muon under tensor cuts: a plan named such a layout first."""
    choices = [*candidates(shape(), 4, flash=True, elementwise=False)]
    assert choices and all(choice.degrees.tensor == 1 for choice in choices)
    assert any(choice.degrees.tensor > 1 for choice in candidates(shape(), 4, flash=True))
    for use in ("lamb", "lars", "adafactor", "muon"):
        assert read_part("optimizers", {"use": use}).config.elementwise is False
    assert read_part("optimizers", {"use": "lion"}).config.elementwise


def test_micro_batches_divide_and_flash_attention_keeps_no_scores_to_recompute() -> None:
    assert micro_sizes(12) == [1, 2, 4, 12] and micro_sizes(256) == [1, 2, 4, 8, 16, 32, 64]
    assert Recompute.parse("selective") in recompute_choices(shape(), flash=False)
    assert Recompute.parse("selective") not in recompute_choices(shape(), flash=True)
    assert recompute_choices(Shape(), flash=True) == [Recompute()]


def test_depths_are_those_of_a_uniform_partition() -> None:
    """26 blocks on 4 stages: 6, 6, 7, 7; the first has the embedding, the last the head."""
    assert depths(24, 4, 1) == (7, 6)
    assert depths(24, 1, 1) == (24, 24)


def test_ranks_are_in_the_order_of_seconds_and_change_at_the_tie() -> None:
    rows = ranking(16).ranked
    seconds = [row.seconds for row in rows]
    assert seconds == sorted(seconds) and rows[0].rank == 1
    for row in rows:
        leader = next(other for other in rows if other.rank == row.rank)
        assert row.seconds <= TIE * leader.seconds
        assert (row.low, row.high) == pytest.approx((row.seconds / BARS["a100"], row.seconds * BARS["a100"]))
        assert sum(row.shares.values()) == pytest.approx(1)
    for before, row in pairwise(rows):
        if row.rank > before.rank:
            leader = next(other for other in rows if other.rank == before.rank)
            assert row.seconds > TIE * leader.seconds


def test_the_plainest_of_the_first_rank_is_chosen() -> None:
    chosen = ranking(16).chosen
    assert chosen is not None and chosen.rank == 1
    assert chosen.choice.axes == ("sharding",) and chosen.choice.stage == 1
    assert chosen.seconds <= TIE * ranking(16).ranked[0].seconds


def test_layouts_that_no_run_judges_have_no_rank() -> None:
    rows = ranking(16).unforetold
    assert rows and not any(is_foretold(row.choice) or row.rank for row in rows)
    assert all(row.choice.stage >= 2 or row.choice.degrees.sequence > 1 for row in rows)
    assert all(row.choice.stage < 2 and row.choice.degrees.sequence == 1 for row in ranking(16).ranked)


def test_what_does_not_fit_is_told_with_its_bytes() -> None:
    misfits = {str(each.choice): each.memory for each in ranking(16).misfits}
    assert 16 * sum(w.size for block in blocks() for w in block) < misfits["data 16"].total
    assert all(memory.total > USABLE_MEMORY * 80e9 for memory in misfits.values())
    small = ranking(1, "v100-16")
    assert small.chosen is None and small.legal > 0 and not small.ranked


def test_bytes_are_those_of_check() -> None:
    choice = Candidate(degrees=Degrees(sharding=4, tensor=2, pipeline=2), micro=2, micro_batches=32, stage=1)
    memory = FullestRank(blocks(), GPT, LOW).bytes_of(choice)
    memories = rank_memories(blocks(), choice.layout(LOW))
    tokens = Tokens(length=2048, samples=2, width=4096, heads=32, vocab=50304, tensor=2)
    first, last = (
        max(m.total for m in memories if m.coords["pipeline"] == stage)
        + layers * waiting * tokens.block("selective")
        + (tokens.head() + (LOGIT_PEAK - 4) * 2048 * 2 * 50304 / 2 if stage else 0)
        for stage, layers, waiting in ((0, 12, 2), (1, 12, 1))
    )
    assert memory.total == pytest.approx(max(first, last))


def test_the_dtype_in_which_gradients_travel_counts_on_the_link_and_in_memory() -> None:
    choice = Candidate(degrees=Degrees(data=8), micro=1, micro_batches=32)
    narrow = replace(LOW, reduce_dtype="bfloat16")
    plain, narrower = (FullestRank(blocks(), GPT, each).bytes_of(choice) for each in (LOW, narrow))
    elements = sum(weight.size for block in blocks() for weight in block)
    assert (LOW.gradient, narrow.gradient) == (4, 2)
    assert narrower.total - plain.total == pytest.approx(
        2 * elements
    )  # received sums, until they are converted


def test_the_logits_of_one_stage_are_in_float32_three_times() -> None:
    """Forward keeps 4 bytes of a logit (`check`); softmax and gradient are there while the loss is computed."""
    choice = Candidate(degrees=Degrees(tensor=8), micro=2, micro_batches=128)
    tokens = Tokens(length=2048, samples=2, width=4096, heads=32, vocab=50304, tensor=8)
    logits = 2048 * 2 * 50304 / 8
    kept = 24 * tokens.block("selective") + tokens.head() + 8 * logits
    assert FullestRank(blocks(), GPT, LOW).bytes_of(choice).activations == pytest.approx(kept)


def test_the_even_share_is_never_more_than_the_fullest_rank() -> None:
    fullest = FullestRank(blocks(), GPT, LOW)
    for choice in [*candidates(shape(), 8, flash=True)][::101]:
        assert fullest.least(choice) <= fullest.bytes_of(choice).total


def test_the_recipes_own_layout_is_judged_or_does_not_fit() -> None:
    own = Candidate(degrees=Degrees(tensor=8), micro=1, micro_batches=256)
    row = planner().ranking(8, own).current
    assert row is not None and not isinstance(row, Misfit) and row.rank == 1
    heavy = Candidate(degrees=Degrees(data=8), micro=1, micro_batches=32)
    assert isinstance(planner().ranking(8, heavy).current, Misfit)


def test_no_layout_is_said_so() -> None:
    nothing = planner().ranking(29)
    assert (nothing.legal, nothing.chosen, nothing.ranked) == (0, None, ())


def test_a_precision_or_device_without_runs_has_the_widest_bar() -> None:
    assert planner().bars == "a100" and planner("h100").bars == "h100"
    assert planner("v100-32").bars == "other" and planner(low=False).bars == "other"
    assert BARS["other"] == max(bar for name, bar in BARS.items() if name != "traced") < BARS["traced"]
    assert [bar_class(family, 1024) for family in ("a100", "h100", "v100")] == ["narrow", "other", "other"]


class Sizes:
    """The settings of a model's Config."""

    width, depth, heads, length, vocab = 4096, 24, 32, 2048, 50304

    def __init__(self, **changes: Any) -> None:
        vars(self).update(changes)


def test_sizes_come_from_settings_and_are_held_against_the_weights() -> None:
    assert transformer(Sizes(), 0, blocks()) == GPT
    assert transformer(Sizes(tied=True), 512, blocks()) == replace(GPT, length=512, tables=1)
    gated = [*blocks()]
    extra = Weight(name="gate", size=4096 * 16384, shape=(4096, 16384))
    found = transformer(Sizes(), 0, [[*block, extra] for block in gated])
    assert isinstance(found, Transformer) and found.matrices == 3


def test_heads_may_have_a_width_of_their_own() -> None:
    """As those of Qwen3-0.6B and of ERNIE 4.5, whose blocks were taken for another architecture's."""
    wide = replace(GPT, head_width=256)
    assert transformer(Sizes(head_width=256), 0, blocks(wide)) == wide
    choices = [Candidate(degrees=Degrees(sequence=2), micro=1, micro_batches=32)]
    plain, double = (workload_of(model, choices, DEVICES["a100-80"], LOW) for model in (GPT, wide))
    assert double.block_weights - plain.block_weights == 4 * 4096**2
    assert double.flops - plain.flops == (6 * 4 * 4096**2 + 12 * 2048 * 4096) * 24 * 32 * 2048
    layout = Candidate(degrees=Degrees(data=8), micro=1, micro_batches=32)
    kept = [FullestRank(blocks(model), model, LOW).bytes_of(layout).activations for model in (GPT, wide)]
    assert kept[1] - kept[0] == pytest.approx(24 * 8 * 2048 * 4096)  # q, k, v and the output, in 16 bits


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (object(), "no width, depth and heads"),
        (Sizes(vocab=None), "no length and vocab"),
        (Sizes(depth=23), "26 ordered blocks, and 23 between"),
        (
            Sizes(hidden=7000),
            "a block's matrices have 201,326,592 elements, and attention with an MLP of 7000",
        ),
    ],
)
def test_another_model_is_not_taken_for_a_transformer(config: object, reason: str) -> None:
    assert reason in str(transformer(config, 0, blocks()))


def test_blocks_that_differ_are_not_taken_for_the_first() -> None:
    """Every other block of some models has experts: a plan took all of them for dense ones."""
    dense, experts = blocks(), Weight(name="experts", size=8 * 4096**2, shape=(8, 4096, 4096))
    mixed = [[*block, experts] if number == 2 else block for number, block in enumerate(dense)]
    assert (
        "its blocks differ: the matrices of block 1 have 201,326,592 elements, and those of block 2"
        in str(transformer(Sizes(), 0, mixed))
    )
    everywhere = [dense[0], *([*block, experts] for block in dense[1:-1]), dense[-1]]
    assert "a block's matrices have 335,544,320 elements" in str(transformer(Sizes(), 0, everywhere))


def test_attention_in_both_directions_skips_no_tile() -> None:
    choice = Candidate(degrees=Degrees(data=8), micro=1, micro_batches=32)
    both = transformer(Sizes(causal=False), 0, blocks())
    assert isinstance(both, Transformer) and GPT.causal and both == replace(GPT, causal=False)
    one, two = (
        step_time(workload_of(model, [choice], DEVICES["a100-80"], LOW)).terms["attention"][0]
        for model in (GPT, both)
    )
    assert two / one == pytest.approx(2, rel=0.01)
