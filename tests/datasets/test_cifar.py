"""CIFAR from its folder and from its archive, in the very format of its page."""

import pickle
import random
import tarfile

import numpy as np
import pytest

from paddle_dp.datasets.cifar import Config
from paddle_dp.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 3072), dtype=np.uint8)
LABELS = np.arange(12) % 4


def save(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.fixture
def ten(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    save(folder / "batches.meta", {"label_names": ["a", "b", "c", "d"]})
    for i in range(5):
        save(
            folder / f"data_batch_{i + 1}",
            {"data": PIXELS[2 * i : 2 * i + 2], "labels": LABELS[2 * i : 2 * i + 2].tolist()},
        )
    save(folder / "test_batch", {"data": PIXELS[10:], "labels": LABELS[10:].tolist()})
    return folder


@pytest.fixture
def hundred(tmp_path):
    folder = tmp_path / "cifar-100-python"
    save(folder / "meta", {"fine_label_names": list("abcd"), "coarse_label_names": ["x", "y"]})
    for name, rows in (("train", slice(10)), ("test", slice(10, 12))):
        labels = LABELS[rows]
        save(
            folder / name,
            {"data": PIXELS[rows], "fine_labels": labels.tolist(), "coarse_labels": (labels % 2).tolist()},
        )
    return folder


PLAIN = {"pad": 0, "flip": 0.0, "mean": (0, 0, 0), "std": (1 / 255,) * 3}


def test_pictures_and_labels_are_those_of_the_files(ten):
    train, test = (Config(path=str(ten), **PLAIN).build(split) for split in ("train", "test"))
    assert np.allclose(train.take(np.arange(10))[0].reshape(10, -1), PIXELS[:10])
    assert np.allclose(test[1][0].ravel(), PIXELS[11]) and test[1][0].shape == (3, 32, 32)
    assert train.labels.tolist() == LABELS[:10].tolist() and train.labels.dtype == np.int64
    assert train.classes == ("a", "b", "c", "d") and test[0][0].dtype == np.float32


def test_the_folder_above_and_the_archive_do_as_well(ten, tmp_path):
    archive = tmp_path / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(ten, arcname=ten.name)
    expected = Config(path=str(ten)).build("test").take(np.arange(2))[0]
    for path in (tmp_path, archive):
        assert (Config(path=str(path)).build("test").take(np.arange(2))[0] == expected).all()


def test_a_hundred_classes_have_fine_and_coarse_labels(hundred):
    fine, coarse = (Config(path=str(hundred), labels=labels).build("test") for labels in ("fine", "coarse"))
    assert fine.labels.tolist() == LABELS[10:].tolist() and fine.classes == tuple("abcd")
    assert coarse.labels.tolist() == (LABELS[10:] % 2).tolist() and coarse.classes == ("x", "y")


def test_training_moves_and_mirrors_and_the_test_does_not(ten):
    train = Config(path=str(ten), **PLAIN | {"pad": 2, "flip": 0.5}).build("train")
    assert not hasattr(train, "take") and len(train) == 10
    whole = np.pad(PIXELS[3].reshape(3, 32, 32), ((0, 0), (2, 2), (2, 2)))
    possible = {
        view[:, :, ::step].astype(np.float32).tobytes()
        for top in range(5) for left in range(5) for step in (1, -1)
        for view in [whole[:, top : top + 32, left : left + 32]]
    }  # fmt: skip
    random.seed(0)
    seen = {np.round(train[3][0]).astype(np.float32).tobytes() for _ in range(400)}
    assert seen == possible


def test_a_pickle_that_would_run_something_does_not(ten, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "made"), "w"))

    save(ten / "test_batch", {"data": Evil(), "labels": [0]})
    with pytest.raises(DataError, match=r"test_batch cannot be read: it asks for (_io|io)\.open"):
        Config(path=str(ten)).build("test")
    assert not (tmp_path / "made").exists()


def test_the_pickles_of_python_2_are_read(ten):
    """The bytes that Python 2 and its NumPy wrote, as in the files of CIFAR's page."""
    data = bytes(range(256)) * 12
    dtype = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01K\x01M\x00\x0c\x86"
    words = (
        b"\x80\x02}(U\x04data" + array + dtype + b"\x89T\x00\x0c\x00\x00" + data + b"tbU\x06labels](K\x03eu."
    )
    (ten / "test_batch").write_bytes(words)
    picture, label = Config(path=str(ten), **PLAIN).build("test")[0]
    assert label == 3 and picture.ravel()[:3000].astype(int).tolist() == list(data[:3000])


def test_what_is_wrong_is_told(ten, tmp_path):
    with pytest.raises(DataError, match=r"dataset.path is not given"):
        Config().build("train")
    with pytest.raises(DataError, match="CIFAR-10, which has no coarse labels"):
        Config(path=str(ten), labels="coarse").build("train")
    save(ten / "data_batch_3", {"labels": [1]})
    with pytest.raises(DataError, match="data_batch_3 has no data; it has labels"):
        Config(path=str(ten)).build("train")
    (ten / "data_batch_3").write_bytes(b"\x80\x02}q")
    with pytest.raises(DataError, match="data_batch_3 cannot be read"):
        Config(path=str(ten)).build("train")
    (ten / "data_batch_3").unlink()
    with pytest.raises(DataError, match="no file data_batch_3"):
        Config(path=str(ten)).build("train")
    (ten / "batches.meta").unlink()
    with pytest.raises(DataError, match=r"no batches.meta and no meta"):
        Config(path=str(ten)).build("train")
    (tmp_path / "cut.tar.gz").write_bytes(b"\x1f\x8b\x08no archive")
    with pytest.raises(DataError, match="cannot be read as an archive"):
        Config(path=str(tmp_path / "cut.tar.gz")).build("train")
