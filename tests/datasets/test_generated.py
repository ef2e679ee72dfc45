"""Noise that is the same whenever and by whomever it is read."""

import numpy as np
import pytest

from paddle_dp.datasets import random_images, random_tokens

BOTH = [random_images.Config(shape=(3, 6, 5), classes=7, samples=20, test_samples=9),
        random_tokens.Config(vocab=50, length=12, samples=20, test_samples=9)]  # fmt: skip


def flat(sample):
    return tuple(np.concatenate([np.ravel(part).astype(float) for part in sample]))


@pytest.mark.parametrize("config", BOTH, ids=["images", "tokens"])
def test_a_sample_is_a_pure_function_of_seed_split_and_index(config):
    data = config.build("train")
    first = [flat(data[i]) for i in range(20)]
    np.random.seed(1)
    assert [flat(config.build("train")[i]) for i in reversed(range(20))] == first[::-1]
    others = [flat(type(config)(**vars(config) | {"seed": 1}).build("train")[i]) for i in range(20)]
    tests = [flat(config.build("test")[i]) for i in range(9)]
    assert len({*first, *others, *tests}) == 49
    assert len(data) == 20 and len(config.build("test")) == 9


@pytest.mark.parametrize("config", BOTH, ids=["images", "tokens"])
def test_take_gives_what_one_by_one_gives(config):
    data = config.build("train")
    inputs, targets = data.take(np.array([7, 3]))
    for row, index in enumerate((7, 3)):
        assert (inputs[row] == data[index][0]).all() and (targets[row] == data[index][1]).all()
    assert inputs.dtype == data[0][0].dtype and targets.dtype == np.int64


def test_images_look_normalised():
    data = random_images.Config(shape=(3, 32, 32), classes=5, samples=64).build("train")
    inputs, targets = data.take(np.arange(64))
    assert inputs.dtype == np.float32 and inputs.shape == (64, 3, 32, 32)
    assert abs(inputs.mean()) < 0.02 and abs(inputs.var() - 1) < 0.02
    assert set(targets) == set(range(5))


def test_targets_are_the_next_tokens():
    inputs, targets = random_tokens.Config(vocab=9, length=200).build("train")[3]
    assert inputs.shape == targets.shape == (200,) and (inputs[1:] == targets[:-1]).all()
    assert set(inputs) == set(range(9))


def test_the_end_is_an_end():
    data = BOTH[0].build("train")
    assert len(list(data)) == 20
    with pytest.raises(ValueError, match="split"):
        BOTH[1].build("val")
