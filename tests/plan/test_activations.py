"""The estimate is the paper's: Korthikanti et al., arXiv:2205.05198, by its own numbers."""

from dataclasses import replace

import pytest

from paddle_dp.plan.activations import Tokens, activation_bytes, in_flight, recomputed_blocks
from paddle_dp.units import Recompute

# Table 3: the 175B model, s 2048, v 51200, t 8; the paper's b is 1.
GPT3 = {"length": 2048, "samples": 1, "width": 12288, "heads": 96, "vocab": 51200, "tensor": 8}
SBH = 2048 * 12288


def test_a_block_keeps_what_the_paper_says():
    assert 5 * 96 * 2048 / 12288 == 80  # section 5: 5as/h is 80 for GPT-3
    plain, cut = Tokens(**GPT3 | {"tensor": 1}), Tokens(**GPT3)
    along = Tokens(**GPT3, sequence_parallel=True)
    assert plain.block("none") == SBH * (34 + 80)
    assert cut.block("none") == SBH * (10 + 24 / 8 + 80 / 8)
    assert along.block("none") == SBH / 8 * (34 + 80)
    assert along.block("selective") == SBH / 8 * 34
    assert cut.block("full") == SBH * 2


def test_a_sequence_rank_has_the_scores_of_its_heads_with_all_tokens():
    """They were counted as those of its own tokens alone: half of them on 2 ranks."""
    plain, half = Tokens(**GPT3), Tokens(**GPT3 | {"length": 1024, "attended": 2048})
    for keeps in ("none", "selective", "full"):
        assert half.block(keeps) == plain.block(keeps) / 2
    masks = [
        replace(tokens, masked=True).block("selective") - tokens.block("selective")
        for tokens in (plain, half)
    ]
    assert masks == [2 * 2048**2] * 2  # of documents: each rank has the mask of the whole sample


def test_selective_saves_what_the_paper_says():
    """Section 5: recomputing attention alone takes 70 % of the activations of GPT-3 away."""
    tokens = Tokens(**GPT3, sequence_parallel=True)
    assert 1 - tokens.block("selective") / tokens.block("none") == pytest.approx(0.70, abs=0.005)


def test_the_first_stage_keeps_as_much_as_all_layers_of_one_micro():
    """Section 4.2.3: whatever the degree, L layers of one micro-batch; interleaved, 1 + (p - 1)/(p·m) times that."""
    stages, tokens = [[0, *range(1, 13)]], Tokens(**GPT3)
    micro_batches = in_flight("1f1b", 4, 0, 16, 1)
    assert micro_batches == 4
    assert activation_bytes(tokens, stages, 50, Recompute(), micro_batches) == 48 * tokens.block("none")
    micro_batches = in_flight("interleaved", 4, 0, 16, 3)
    # Of 4 blocks, 3 stages of them, where L is 48.
    assert micro_batches * 3 * 4 == pytest.approx(48 * (1 + 3 / (4 * 3)))


def test_fewer_micros_than_stages_wait_all():
    assert in_flight("1f1b", 4, 0, 2, 1) == 2
    assert in_flight("1f1b", 4, 3, 16, 1) == 1
    assert in_flight("f_then_b", 4, 3, 16, 1) == 16
    assert in_flight("1f1b", 1, 0, 16, 1) == 1


def test_what_is_recomputed_is_there_once():
    tokens, stages = Tokens(**GPT3), [list(range(10))]
    none, full = (
        activation_bytes(tokens, stages, 10, Recompute.parse(word), 1.0) for word in ("none", "full")
    )
    half = activation_bytes(tokens, stages, 10, Recompute.parse("every 2 blocks"), 1.0)
    assert none - full == 7 * tokens.block("none") - 8 * tokens.block("full")
    assert full < half < none


def test_backward_computes_the_same_blocks_again_as_the_package_does():
    """Every second block, and neither the last nor the first: nobody needs the gradient of its inputs."""
    words = {"full": [1, 2, 3], "every 2 blocks": [1, 3], "every 3 blocks": [2], "none": []}
    for word, numbers in words.items():
        assert [*recomputed_blocks(5, Recompute.parse(word))] == numbers


def test_wider_numbers_take_more():
    narrow, wide = Tokens(**GPT3), Tokens(**GPT3, bytes=4)
    assert wide.block("none") == 2 * narrow.block("none")
    assert wide.head() - narrow.head() == 4 * SBH / 8  # the scores are of 4 bytes in both
