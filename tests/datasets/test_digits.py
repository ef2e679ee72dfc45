"""The digits are scikit-learn's, each on one side of a split that only the settings decide."""

import subprocess
import sys

import numpy as np
import pytest

from paddle_dp.datasets._arrays import stratified
from paddle_dp.datasets.digits import Config


def test_they_are_the_digits_of_scikit_learn():
    from sklearn.datasets import load_digits

    theirs = load_digits()
    both = [Config().build(split) for split in ("train", "test")]
    ours = {(*inputs.tolist(), int(target)) for data in both for inputs, target in data}
    assert ours == {(*(x / 16).tolist(), int(y)) for x, y in zip(theirs.data, theirs.target, strict=True)}
    assert [len(data) for data in both] == [1437, 360]


def test_every_class_is_held_out_in_its_proportion():
    train, test = (np.bincount(Config().build(split).targets) for split in ("train", "test"))
    assert np.abs(test - 0.2 * (train + test)).max() < 1


def test_the_split_is_decided_by_its_settings_alone():
    first = Config().build("test").inputs
    assert (first == Config().build("test").inputs).all()
    assert Config(seed=1).build("test").inputs.shape == first.shape
    assert not (Config(seed=1).build("test").inputs == first).all()
    assert len(Config(held_out=0.5).build("train")) == 898


def test_the_file_is_read_once_and_a_changed_data_set_changes_no_other(monkeypatch):
    first = Config().build("train")
    before = first.inputs.copy()
    first.inputs[:], first.targets[:] = 0, 0
    monkeypatch.setattr("gzip.open", None)
    assert (Config().build("train").inputs == before).all() and Config().build("train").targets.max() == 9


def test_shapes_and_types():
    flat, image = Config().build("train"), Config(as_image=True).build("train")
    assert flat[0][0].shape == (64,) and image[0][0].shape == (1, 8, 8)
    assert image[0][0].dtype == np.float32 and image[0][1].dtype == np.int64
    assert 0 == flat.inputs.min() < flat.inputs.max() == 1
    assert flat.classes == tuple("0123456789")


def test_take_gives_what_one_by_one_gives():
    data = Config(as_image=True).build("test")
    inputs, targets = data.take(np.array([5, 0, 5]))
    assert all(
        (inputs[row] == data[i][0]).all() and targets[row] == data[i][1] for row, i in enumerate((5, 0, 5))
    )


def test_an_image_is_enlarged_by_its_pixels_and_in_each_channel():
    small = Config(as_image=True).build("test")
    large = Config(as_image=True, size=32, channels=3).build("test")
    image, pixels = large[7][0], small[7][0][0]
    assert image.shape == (3, 32, 32)
    assert (image == np.kron(pixels, np.ones((4, 4)))).all()


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="size: 30 is no multiple of 8"):
        Config(as_image=True, size=30)
    with pytest.raises(ValueError, match="set as_image to true"):
        Config(channels=3)
    with pytest.raises(ValueError, match="held_out: 1 leaves nothing"):
        Config(held_out=1.0)
    with pytest.raises(ValueError, match="'valid' is neither 'train' nor 'test'"):
        Config().build("valid")


def test_reading_them_imports_neither_scikit_learn_nor_paddle():
    code = (
        "import sys; from paddle_dp.datasets.digits import Config; Config().build('test');"
        "assert not {'sklearn', 'paddle'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 1 / 3, 0.9])
@pytest.mark.parametrize("counts", [(1,), (5, 5), (1, 2, 30), (7, 7, 7)])
def test_a_stratified_split_holds_out_what_it_says(fraction, counts):
    labels = np.repeat(np.arange(len(counts)), counts)
    out = stratified(labels, fraction, seed=0)
    assert out.sum() == np.ceil(fraction * sum(counts) - 1e-9)
    assert np.abs(np.bincount(labels[out], minlength=len(counts)) - fraction * np.array(counts)).max() <= 1
