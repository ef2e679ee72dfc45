"""Lists of images: what a line says, and what is wrong with one, by its number."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from paddle_dp.datasets.image_list import Config
from paddle_dp.errors import DataError
from paddle_dp.part import read_part


@pytest.fixture
def root(tmp_path: Path, save_image) -> Path:
    for name in ("a.png", "b c.png", "d.png", "e.png"):
        save_image(tmp_path / "images" / name)
    (tmp_path / "train_list.txt").write_text(
        "images/a.png 0\nimages/b c.png 2\r\n\nimages/d.png 1\n", "utf-8"
    )
    (tmp_path / "val_list.txt").write_text("images/e.png 2\n", "utf-8")
    return tmp_path


def config(root: Path, **settings: object) -> Config:
    return Config(path=str(root), **{"size": 16, "resize": 20} | settings)


def test_a_line_is_a_path_and_a_class(root: Path) -> None:
    train, test = config(root).build("train"), config(root).build("test")
    assert [Path(train.name_of(i)).name for i in range(3)] == ["a.png", "b c.png", "d.png"]
    assert (
        train.labels.tolist() == [0, 2, 1] and train.labels.dtype == np.int64 and test.labels.tolist() == [2]
    )
    assert train.classes == test.classes == ("0", "1", "2")
    image, label = train[1]
    assert image.shape == (3, 16, 16) and label == 2


@pytest.mark.parametrize("separator", ["tab", "comma"])
def test_lists_have_other_separators_and_other_names(root: Path, separator: str) -> None:
    between = {"tab": "\t", "comma": ", "}[separator].rstrip(" ")
    (root / "mine.txt").write_text(f"\ufeffimages/b c.png{between}1\n", "utf-8")
    (root / "val_list.txt").write_text(f"images/e.png{between}0\n", "utf-8")
    (root / "labels.txt").write_text("0 tabby cat\n1 dog\n", "utf-8")
    data = config(root, train="mine.txt", separator=separator, names="labels.txt").build("train")
    assert data.labels.tolist() == [1] and data.classes == ("tabby cat", "dog")
    assert data[0][0].shape == (3, 16, 16)


def test_names_stand_alone_too(root: Path) -> None:
    (root / "labels.txt").write_text("猫\n2 dogs\neel\n", "utf-8")
    assert config(root, names="labels.txt").build("train").classes == ("猫", "2 dogs", "eel")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("images/a.png", "txt:2: 'images/a.png' is not a path, a space and the number of one class"),
        ("images/a.png 0,1,0", "is not a path, a space and the number"),
        ("images/a.png -1", "is not a path, a space and the number"),
        ("images/a.png\t1", "dataset.separator: space, tab or comma"),
        (" 3", "is not a path"),
        ("images/a.png 20260101", "the number of one class, 0 to 999,999"),
        ("images/a.png 99999999999999999999", "the number of one class"),
    ],
)
def test_a_line_of_another_form_is_named(root: Path, line: str, message: str) -> None:
    (root / "train_list.txt").write_text(f"images/a.png 0\n{line}\n")
    with pytest.raises(DataError, match=f"train_list.*{message}"):
        config(root).build("train")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("2 cat\n0 dog\n1 cow\n", ("dog", "cow", "cat")),
        ("0\tdog\n1\tcow\n2\tcat\n", ("dog", "cow", "cat")),
        ("1 dog\n2 cow\n3 cat\n", None),
        ("0 dog\n0 cow\n2 cat\n", None),
    ],
)
def test_numbered_names_are_in_the_order_of_their_numbers(root: Path, text: str, names: Any) -> None:
    (root / "labels.txt").write_text(text)
    if names is not None:
        assert config(root, names="labels.txt").build("train").classes == names
        return
    with pytest.raises(DataError, match=r"labels.txt numbers its classes, and not each from 0 to 2 once"):
        config(root, names="labels.txt").build("train")


def test_what_is_missing_is_named(root: Path) -> None:
    (root / "labels.txt").write_text("cat\ndog\n")
    for settings, message in (
        ({"names": "labels.txt"}, "labels.txt names 2 classes, and the labels have 3"),
        ({"train": "none.txt"}, r"dataset\.train: .*none.txt does not exist"),
        ({"names": "none.txt"}, r"dataset\.names: .*none.txt does not exist"),
        ({"train": "images/a.png"}, "cannot be read as a text"),
    ):
        with pytest.raises(DataError, match=message):
            config(root, **settings).build("train")
    (root / "val_list.txt").write_text("images/a.png 5\nimages/a.png 0\n")
    with pytest.raises(DataError, match=r"val_list.txt has classes that .*train_list.txt has no image of: 5"):
        config(root).build("test")
    (root / "train_list.txt").write_text("\n")
    with pytest.raises(DataError, match="lists no image"):
        config(root).build("train")
    with pytest.raises(DataError, match=r"dataset\.path is not given"):
        Config().build("train")


def test_an_image_that_is_not_there_is_named_when_it_is_read(root: Path) -> None:
    (root / "train_list.txt").write_text("images/gone.png 0\n")
    with pytest.raises(DataError, match=r"gone.png cannot be read as an image"):
        config(root).build("train")[0]


# --- several labels


def test_an_image_of_both_lists_is_refused_unless_one_list_is_both(root: Path) -> None:
    (root / "val_list.txt").write_text("images/e.png 2\nimages/./d.png 1\n", "utf-8")
    with pytest.raises(DataError, match=r"val_list\.txt lists images/d\.png, and so does .*train_list\.txt"):
        config(root).build("train")
    assert len(config(root).build("test")) == 2
    assert len(config(root, test="train_list.txt").build("train")) == 3


def labelled(root: Path, *lines: str, **settings: object) -> Config:
    (root / "train_list.txt").write_text("".join(f"images/a.png\t{line}\n" for line in lines), "utf-8")
    (root / "val_list.txt").write_text("images/e.png\t0,0,0\n", "utf-8")
    return config(root, separator="tab", **{"labels": 3} | settings)


def test_a_line_may_have_several_labels(root: Path) -> None:
    (root / "labels.txt").write_text("hat\nbag\ncoat\n", "utf-8")
    data = labelled(root, "0,1,1", "1, 0,0", names="labels.txt").build("train")
    assert data.classes == ("hat", "bag", "coat") and len(data) == 2
    assert data[0][1].tolist() == [0.0, 1.0, 1.0] and data[1][1].tolist() == [1.0, 0.0, 0.0]
    assert data[0][1].dtype == np.float32
    assert labelled(root, "0,1,1").build("test")[0][1].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("line", ["0,1", "0,1,1,0", "0,1,2", "0,1,", "0.5,1,1", "", "3", "1 0 1", "0,-1,1"])
def test_other_labels_are_named_by_their_line(root: Path, line: str) -> None:
    with pytest.raises(
        DataError, match=r"train_list\.txt:2: .* is not a path, a tab and 3 labels, each 0 or 1"
    ):
        labelled(root, "0,1,1", line).build("train")


# --- images that are not square


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize(
    "settings", [{}, {"fit": "stretch"}, {"fit": "stretch", "pad": 3, "augment": "rand"}]
)
def test_the_size_is_height_and_width(root: Path, split: str, settings: dict[str, Any]) -> None:
    image, _ = config(root, size=(24, 12), resize=None, **settings).build(split)[0]
    assert image.shape == (3, 24, 12)


def test_evaluation_keeps_proportions_or_takes_the_whole_image(root: Path) -> None:
    """A picture of two halves, red and blue: the centre of a high crop has both, as wide as before."""
    pixels = np.zeros((30, 60, 3), np.uint8)
    pixels[:, :30, 0] = pixels[:, 30:, 2] = 255
    pixels[:, :10] = 255  # 10 columns of white
    Image.fromarray(pixels).save(root / "images" / "e.png")
    settings: dict[str, Any] = {"resize": None, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    row = config(root, size=(28, 14), **settings).build("test")[0][0][:, 14]  # 32 x 64, the middle 14 columns
    assert (row[0, :6] > 0.9).all() and (row[2, 8:] > 0.9).all() and (row[1] < 0.1).all()
    whole = config(root, size=(28, 14), fit="stretch", **settings).build("test")[0][0][:, 14]
    assert (whole[1, :2] > 0.5).all() and (whole[1, 4:] < 0.1).all()  # a sixth of the width is white
    square = config(root, size=14, **settings).build("test")[0][0]
    pair = config(root, size=(14, 14), **settings).build("test")[0][0]
    np.testing.assert_array_equal(square, pair)


def test_a_shift_moves_black_in(root: Path) -> None:
    Image.new("RGB", (20, 20), (255, 255, 255)).save(root / "images" / "a.png")
    settings: dict[str, Any] = {"resize": None, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    data = config(root, size=(8, 6), fit="stretch", pad=2, **settings).build("train")
    counts = set()
    for seed in range(100):
        random.seed(seed)
        black = data[0][0][0] < 0.5
        counts.add((int(black.all(1).sum()), int(black.all(0).sum())))
    assert counts == {(rows, columns) for rows in range(3) for columns in range(3)}


def test_every_image_may_be_erased(root: Path) -> None:
    assert read_part("datasets", {"use": "image_list", "path": str(root), "erase": 1.0}).config.erase == 1.0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"size": (24, 12)}, "resize: is of a square input, and this one has 24 x 12"),
        ({"fit": "stretch"}, "stretch takes whole images"),
        ({"fit": "stretch", "resize": None, "crop": (0.5, 1.0)}, "stretch takes whole images"),
        ({"pad": 2}, "pad: of fit: stretch"),
        ({"test_size": (30, 30)}, "resize: 20 is less than the size 30"),
        ({"separator": "comma", "labels": 3}, "separator: a comma stands between labels"),
    ],
)
def test_settings_without_effect_are_refused(root: Path, settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        config(root, **settings)
