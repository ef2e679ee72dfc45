"""Folders of images: numbered as they are named, seen as each split sees them, and clear about what is wrong."""

import random

import numpy as np
import pytest
from PIL import Image

from paddle_dp.data import Loader, Sampler
from paddle_dp.datasets._images import IMAGENET_MEAN, IMAGENET_STD
from paddle_dp.datasets.image_folder import Config
from paddle_dp.errors import DataError

COLOURS = {"cat": (200, 40, 40), "dog": (40, 200, 40), "eel": (40, 40, 200)}
SMALL = {"size": 16, "resize": 20}


@pytest.fixture
def root(tmp_path, save_image):
    for split, number in (("train", 4), ("val", 2)):
        for name, colour in COLOURS.items():
            for i in range(number):
                save_image(tmp_path / split / name / f"{i}.{'JPEG' if i % 2 else 'png'}", colour)
    (tmp_path / "train" / "notes.txt").write_text("no class")
    (tmp_path / "train" / "cat" / "list.txt").write_text("no image")
    (tmp_path / "train" / ".cache").mkdir()
    return tmp_path


def config(root, **settings):
    return Config(path=str(root), **SMALL | settings)


def test_classes_are_folders_and_samples_are_images(root):
    train, test = config(root).build("train"), config(root).build("test")
    assert train.classes == test.classes == ("cat", "dog", "eel")
    assert [len(train), len(test)] == [12, 6]
    assert train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert train.name_of(5) == str(root / "train" / "dog" / "1.JPEG")


def test_images_are_normalised_channels_first(root):
    mean, std = (0.5, 0.4, 0.3), (0.1, 0.2, 0.3)
    data = config(root, mean=mean, std=std).build("test")
    for index in range(6):
        image, label = data[index]
        assert image.shape == (3, 16, 16) and image.dtype == np.float32 and image.flags.c_contiguous
        expected = (np.array(list(COLOURS.values())[label]) / 255 - mean) / std
        assert np.abs(image.mean((1, 2)) - expected).max() < 0.1


def test_evaluating_is_the_same_each_time_and_training_differs(root):
    train, test = config(root, jitter=0.4).build("train"), config(root).build("test")
    assert (test[0][0] == test[0][0]).all()
    views = {tuple(train[0][0].ravel()) for _ in range(5)}
    assert len(views) == 5


def test_training_is_random_through_what_the_loader_seeds_alone(root):
    """Jitter, crop and flip: all of it is settled by `random` and `numpy.random`."""
    train = config(root, jitter=0.4).build("train")

    def seen():
        random.seed(5)
        np.random.seed(5)
        return train[1][0]

    first = seen()
    train[0]
    assert (seen() == first).all()


@pytest.mark.processes
def test_workers_see_the_same_images(root):
    data = config(root, jitter=0.2).build("train")
    sampler = Sampler(len(data), 5, seed=2)
    expected = [batch.micro_batches[0].inputs.numpy() for batch in Loader(data, sampler).read(1)]
    with Loader(data, sampler, num_workers=2) as loader:
        got = [batch.micro_batches[0].inputs.numpy() for batch in loader.read(1)]
    assert all((a == b).all() for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("content", [b"", b"this is no image", None], ids=["empty", "text", "cut off"])
def test_an_unreadable_image_is_named(root, content):
    path = root / "val" / "cat" / "1.JPEG"
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    data = config(root).build("test")
    with pytest.raises(DataError, match=r"val/cat/1\.JPEG cannot be read as an image"):
        data[1]
    with pytest.raises(DataError, match=r"^sample 1: .*val/cat/1\.JPEG cannot be read"):
        list(Loader(data, Sampler(6, 2, shuffle=False)).read(0))


@pytest.mark.parametrize(
    ("dtype", "low", "high", "problem"),
    [
        ("uint16", 0, 4095, "between 0 and 4095"),
        (">u2", 0, 65535, "between 0 and 65535"),
        ("int32", -1000, 200, "between -1000 and 200"),
        ("float32", 0, 1, "between 0 and 1,"),
        ("float32", 0, 300, "between 0 and 300"),
        ("uint16", 0, 255, None),
        ("int32", 0, 1, None),
        ("float32", 0, 0, None),
        ("float32", 0, 254.5, None),
    ],
)
def test_pixels_that_eight_bits_do_not_hold_are_refused(root, dtype, low, high, problem):
    """Pillow would make them white or black."""
    pixels = np.linspace(low, high, 256).reshape(16, 16).astype(dtype)
    (root / "val" / "cat" / "0.png").unlink()
    Image.fromarray(pixels).save(root / "val" / "cat" / "0.tif")
    data = config(root, fit="stretch", resize=None, mean=(0, 0, 0), std=(1, 1, 1)).build("test")
    if problem is None:
        assert (data[0][0] == pixels.astype("uint8") / np.float32(255)).all()
    else:
        with pytest.raises(DataError, match=rf"0\.tif cannot be read as an image: .* {problem}"):
            data[0]


def test_what_is_missing_is_told(tmp_path):
    with pytest.raises(DataError, match=r"dataset.path is not given: .*train/<class>/") as error:
        Config().build("train")
    assert error.value.exit_status == 2
    for made, said in (
        (None, r"dataset.path: .*nowhere does not exist"),
        ("images", r"has no train, .*it has images"),
        ("train", "no class folders"),
        ("train/cat", "not one image"),
    ):
        (tmp_path / (made or ".")).mkdir(exist_ok=True)
        with pytest.raises(DataError, match=said):
            config(tmp_path if made else tmp_path / "nowhere").build("train")


def test_folders_that_are_not_as_they_should_be_are_told(root):
    for name in COLOURS:
        (root / "val" / name).rename(root / "val" / name.upper())
    with pytest.raises(DataError, match=r"different classes: only one of them has CAT, DOG, EEL, cat"):
        config(root).build("test")
    (root / "val").rename(root / "else")
    with pytest.raises(
        DataError, match="has no val or valid or validation or test, the images to evaluate on"
    ):
        config(root).build("test")
    (root / "test").mkdir()
    with pytest.raises(DataError, match="test has no class folders"):
        config(root).build("test")


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"resize": 8}, "resize"), ({"crop": (0.5, 0.1)}, "crop"), ({"std": (1, 1, 0)}, "std")],
)
def test_nonsense_is_refused_by_name(settings, word):
    with pytest.raises(ValueError, match=f"^{word}: "):
        Config(**SMALL | settings)


def test_class_folders_alone_are_split_by_a_share(tmp_path, save_image):
    for name, colour in COLOURS.items():
        for i in range(10):
            save_image(tmp_path / name / f"{i}.png", colour)
    with pytest.raises(
        DataError, match=r"holds class folders, and no train/ and val/: set dataset\.held_out=0\.2"
    ):
        config(tmp_path).build("train")
    train, test = (config(tmp_path, held_out=0.2).build(split) for split in ("train", "test"))
    assert train.classes == test.classes == ("cat", "dog", "eel")
    assert train.labels.tolist() == [0] * 8 + [1] * 8 + [2] * 8 and test.labels.tolist() == [0, 0, 1, 1, 2, 2]
    files = [*train.files, *test.files]
    assert len({*files}) == len(files) == 30
    assert test.files == config(tmp_path, held_out=0.2).build("test").files


def test_each_class_keeps_an_image_to_train_on(tmp_path, save_image):
    for name in ("train", "bus", "car"):  # a class may be called train
        for i in range(1 if name == "car" else 9):
            save_image(tmp_path / name / f"{i}.png")
    with pytest.raises(DataError, match=r"set dataset\.held_out=0\.2"):
        config(tmp_path).build("train")
    with pytest.raises(DataError, match=r"held_out=0.5 leaves no image to train on of class car"):
        config(tmp_path, held_out=0.5).build("train")
    assert config(tmp_path, held_out=0.2).build("train").classes == ("bus", "car", "train")


def test_a_stray_image_beside_class_folders_is_no_class(root, save_image):
    save_image(root / "train" / "thumb.png")
    save_image(root / "val" / "thumb.png")
    assert len(config(root).build("train")) == 12


def test_a_share_beside_folders_of_both_splits_is_refused(root):
    with pytest.raises(DataError, match="held_out is for class folders in path itself"):
        config(root, held_out=0.2).build("train")


def test_evaluation_sees_most_of_a_picture_of_any_size(tmp_path, save_image):
    """The share of the shorter side is that of 224 of 256, unless `resize` is set."""
    for split in ("train", "val"):
        save_image(tmp_path / split / "cat" / "0.png", (0, 0, 0), 40, 40)
    seen = Config(path=str(tmp_path), size=35).build("test")._view
    view = seen(Image.fromarray(np.arange(40 * 40 * 3, dtype=np.uint8).reshape(40, 40, 3)))
    assert view.shape == (3, 35, 35)
    expected = (np.arange(40 * 40 * 3, dtype=np.uint8).reshape(40, 40, 3)[2:37, 2:37] / 255).transpose(
        2, 0, 1
    )
    mean, std = np.array(IMAGENET_MEAN)[:, None, None], np.array(IMAGENET_STD)[:, None, None]
    assert np.abs(view - (expected - mean) / std).max() < 1e-4


def test_held_out_images_may_have_another_size(tmp_path, save_image):
    for split in ("train", "val"):
        save_image(tmp_path / split / "a" / "0.png")
    config = Config(path=str(tmp_path), size=16, test_size=24)
    assert config.build("train")[0][0].shape == (3, 16, 16)
    assert config.build("test")[0][0].shape == (3, 24, 24)
    with pytest.raises(ValueError, match="resize: 20 is less than the size 24"):
        Config(path=str(tmp_path), size=16, test_size=24, resize=20)
