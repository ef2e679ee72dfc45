"""Noise that is the same whenever and by whomever it is read."""

import numpy as np
import pytest

from paddle_dp.datasets import random_identities, random_images, random_tokens

BOTH = [random_images.Config(shape=(3, 6, 5), classes=7, samples=20, test_samples=9),
        random_tokens.Config(vocab=50, length=12, samples=20, test_samples=9),
        random_identities.Config(features=5, classes=60, seen=8, samples=20, test_samples=9)]  # fmt: skip
IDS = ["images", "tokens", "identities"]


def flat(sample):
    return tuple(np.concatenate([np.ravel(part).astype(float) for part in sample]))


@pytest.mark.parametrize("config", BOTH, ids=IDS)
def test_a_sample_is_a_pure_function_of_seed_split_and_index(config):
    data = config.build("train")
    first = [flat(data[i]) for i in range(20)]
    np.random.seed(1)
    assert [flat(config.build("train")[i]) for i in reversed(range(20))] == first[::-1]
    others = [flat(type(config)(**vars(config) | {"seed": 1}).build("train")[i]) for i in range(20)]
    tests = [flat(config.build("test")[i]) for i in range(9)]
    assert len({*first, *others, *tests}) == 49
    assert len(data) == 20 and len(config.build("test")) == 9


@pytest.mark.parametrize("config", BOTH, ids=IDS)
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


def test_views_of_an_identity_are_alike_and_identities_lie_among_all_classes():
    data = random_identities.Config(features=50, classes=1000, seen=4, samples=200, noise=0.5)
    inputs, targets = data.build("train").take(np.arange(200))
    assert set(targets) == {0, 250, 500, 750}
    assert abs(inputs.mean()) < 0.1 and abs(inputs.var() - 1) < 0.2
    likeness = np.corrcoef(inputs)
    alike = targets[:, None] == targets[None]
    assert likeness[alike].min() > likeness[~alike].max()
    for word, wrong in (("seen", {"seen": 9, "classes": 8}), ("noise", {"noise": -1.0})):
        with pytest.raises(ValueError, match=word):
            random_identities.Config(**wrong)


def test_targets_are_the_next_tokens():
    inputs, targets = random_tokens.Config(vocab=9, length=200).build("train")[3]
    assert inputs.shape == targets.shape == (200,) and (inputs[1:] == targets[:-1]).all()
    assert set(inputs) == set(range(9))


def test_the_end_is_an_end():
    data = BOTH[0].build("train")
    assert len(list(data)) == 20
    with pytest.raises(ValueError, match="split"):
        BOTH[1].build("val")
