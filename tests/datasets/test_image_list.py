"""Lists of images: what a line says, and what is wrong with one, by its number."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_dp.datasets.image_list import Config
from paddle_dp.errors import DataError


@pytest.fixture
def root(tmp_path: Path, save_image) -> Path:
    for name in ("a.png", "b c.png", "d.png"):
        save_image(tmp_path / "images" / name)
    (tmp_path / "train_list.txt").write_text(
        "images/a.png 0\nimages/b c.png 2\r\n\nimages/d.png 1\n", "utf-8"
    )
    (tmp_path / "val_list.txt").write_text("images/d.png 2\n", "utf-8")
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
        (
            "images/a.png",
            r"train_list.txt:2: 'images/a.png' is not a path, a space and the number of one class",
        ),
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
    with pytest.raises(DataError, match=message):
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
