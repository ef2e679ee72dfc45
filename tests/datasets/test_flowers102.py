"""Flowers: the official lists, or the swapped ones of Paddle's examples."""

import numpy as np
import pytest

from paddle_dp.datasets.flowers102 import Config
from paddle_dp.errors import DataError


@pytest.fixture
def root(tmp_path, save_image):
    from scipy.io import savemat

    for number in range(1, 9):
        save_image(tmp_path / "jpg" / f"image_{number:05d}.jpg", (10 * number, 50, 50))
    savemat(tmp_path / "imagelabels.mat", {"labels": np.arange(1, 9, dtype=np.uint8)[None] * 12})
    lists = {"trnid": [2, 1], "valid": [3], "tstid": [8, 4, 5, 6, 7]}
    savemat(tmp_path / "setid.mat", {k: np.array([v], dtype=np.uint16) for k, v in lists.items()})
    return tmp_path


def config(root, **settings):
    return Config(path=str(root), size=8, resize=10, **settings)


def test_the_official_lists(root):
    train, test = config(root).build("train"), config(root).build("test")
    assert [len(train), len(test)] == [2, 5]
    assert train.labels.tolist() == [23, 11] and train.name_of(0).endswith("image_00002.jpg")
    assert test.labels.tolist() == [95, 47, 59, 71, 83]
    assert len(train.classes) == 102


def test_swapped_lists_train_on_the_official_test_set(root):
    swapped = config(root, splits="swapped")
    assert swapped.build("train").labels.tolist() == config(root).build("test").labels.tolist()
    assert swapped.build("test").labels.tolist() == config(root).build("train").labels.tolist()


def test_an_image_is_its_own(root):
    data = config(root, mean=(0, 0, 0), std=(1, 1, 1)).build("test")
    assert np.abs(data[0][0].mean((1, 2)) * 255 - [80, 50, 50]).max() < 3


def test_what_is_missing_is_told(root):
    with pytest.raises(DataError, match=r"dataset.path is not given: .*jpg/, imagelabels.mat and setid.mat"):
        Config().build("train")
    (root / "setid.mat").write_bytes(b"not matlab at all")
    with pytest.raises(DataError, match=r"setid.mat cannot be read"):
        config(root).build("train")
    (root / "setid.mat").unlink()
    with pytest.raises(DataError, match=r"has no setid.mat, from https"):
        config(root).build("train")


def test_lists_of_unlabelled_images_are_refused(root):
    from scipy.io import savemat

    savemat(root / "setid.mat", {"trnid": [[9]]})
    with pytest.raises(DataError, match=r"images that imagelabels.mat does not label"):
        config(root).build("train")
