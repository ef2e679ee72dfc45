"""Windows with gaps: as many as asked for, of the kinds of the paper, decided by (seed, epoch, sample)."""

import numpy as np
import pytest

from paddle_dp.data import Loader, Sampler
from paddle_dp.datasets.masked_texts import IGNORED, Config
from paddle_dp.datasets.text_files import Config as Texts

LENGTH, MASK = 100, 256


@pytest.fixture
def texts(tmp_path):
    """Two files of the letters a to z, over and over, of which one is held out."""
    (tmp_path / "texts").mkdir()  # the cache is not among them
    for number in range(2):
        (tmp_path / "texts" / f"{number}.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 1200)
    return {
        "path": str(tmp_path / "texts"),
        "cache": str(tmp_path / "cache"),
        "length": LENGTH,
        "held_out": 0.5,
    }


def read(data, seed=0, epoch=0):
    """All samples of an epoch, in their own order: inputs and targets [n, LENGTH]."""
    loader = Loader(data, Sampler(len(data), len(data), seed=seed, shuffle=False))
    (batch,) = loader.read(epoch)
    return batch.micro_batches[0].inputs.numpy(), batch.micro_batches[0].targets.numpy()


def test_targets_are_the_text_where_something_is_to_be_predicted(texts):
    inputs, targets = read(Config(**texts).build("train"))
    whole, _ = Texts(**texts).build("train").take(np.arange(len(inputs)))
    chosen = targets != IGNORED
    assert (targets[chosen] == whole[chosen]).all() and (inputs[~chosen] == whole[~chosen]).all()
    assert (chosen.sum(1) == 15).all()
    masked, same = inputs[chosen] == MASK, inputs[chosen] == whole[chosen]
    assert masked.mean() == pytest.approx(0.8) and same.mean() == pytest.approx(1 / 15, abs=0.01)
    others = inputs[chosen][~masked & ~same]
    assert len(set(others.tolist())) > 100 and others.max() < MASK  # any token, not only letters


def test_gaps_change_with_the_epoch_and_the_seed_and_with_nothing_else(texts):
    data = Config(**texts).build("train")
    first = read(data)[0]
    assert (read(data)[0] == first).all()
    assert (read(data, epoch=1)[0] != first).any() and (read(data, seed=1)[0] != first).any()
    late = Loader(data, Sampler(len(data), 7, shuffle=False)).read(0, 3)
    np.testing.assert_array_equal(next(late).micro_batches[0].inputs.numpy(), first[21:28])


def test_held_out_gaps_stay(texts):
    data = Config(**texts).build("test")
    assert (read(data)[0] == read(data, seed=5, epoch=3)[0]).all()


@pytest.mark.parametrize(("masked", "gaps"), [(0.0, 1), (0.001, 1), (0.5, 50)])
def test_at_least_one_token_is_masked(texts, masked, gaps):
    """A batch without any would have nothing to divide its loss by."""
    _, targets = read(Config(**texts, masked=masked, mask=3).build("train"))
    assert ((targets != IGNORED).sum(1) == gaps).all()


def test_the_mask_can_be_a_token_of_the_tokenizers(texts):
    inputs, _ = read(Config(**texts, mask=3).build("train"))
    assert (inputs == 3).sum() >= 0.8 * 15 * len(inputs) and inputs.max() < MASK
