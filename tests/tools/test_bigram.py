"""The bigram tool's arithmetic, and its words."""

import math

import numpy as np
import pytest

from tests.house.programs import ROOT
from tools.bigram import bigram_loss, main, unigram_loss


def test_losses_are_those_counted_by_hand():
    train, test = np.array([0, 1, 0, 1, 2], dtype=np.uint8), np.array([0, 1, 1], dtype=np.uint8)
    # 0 → 1 twice of 2; 1 → 0 once, 1 → 2 once: p(1|0) = 3/5, p(1|1) = 1/5
    assert bigram_loss(train, test, 3) == pytest.approx(-(math.log(3 / 5) + math.log(1 / 5)) / 2)
    # of 1 0 1 2, one is twice: p(1) = 3/7
    assert unigram_loss(train, test, 3) == pytest.approx(-math.log(3 / 7))


def test_a_pair_behind_all_known_ones_is_not_taken_for_one():
    train, test = np.array([0, 0, 0]), np.array([2, 2])
    assert bigram_loss(train, test, 3) == pytest.approx(math.log(3))


def test_a_text_that_repeats_is_known_and_noise_is_not():
    rng = np.random.default_rng(0)
    noise, cycle = rng.integers(0, 8, 20000), np.tile(np.arange(8), 2500)
    assert bigram_loss(noise, rng.integers(0, 8, 5000), 8) == pytest.approx(math.log(8), abs=0.01)
    assert bigram_loss(cycle, cycle, 8) < 0.01 and unigram_loss(cycle, cycle, 8) == pytest.approx(math.log(8))


def test_it_prints_what_a_recipe_has_to_get_below(tmp_path, capsys):
    main(ROOT / "configs/gpt_single.yaml", [f"dataset.cache={tmp_path}", "dataset.limit=200 KB"])
    first, unigram, bigram = capsys.readouterr().out.splitlines()
    assert "tokens" in first
    assert 1.5 < float(bigram.split()[1]) < float(unigram.split()[1]) < math.log(256)
