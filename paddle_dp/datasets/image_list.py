"""Images named by two text files, of the samples to train and to evaluate on: a line is a path and a class number, or
several labels.

Reads the lists of PaddleClas (`train_list.txt` of ImageNet: `n01440764/a.JPEG 0`), PaddleX and others.
"""

from __future__ import annotations

from dataclasses import dataclass
from os.path import normpath
from pathlib import Path
from typing import Any, Literal

import numpy as np

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._images import Images, Views
from paddle_dp.datasets._labels import MOST_CLASSES, class_names, lines, refuse_unknown
from paddle_dp.datasets._paths import existing_path
from paddle_dp.errors import DataError
from paddle_dp.text import and_more
from paddle_dp.units import Positive

_SEPARATORS = {"space": " ", "tab": "\t", "comma": ","}


@dataclass(frozen=True, kw_only=True)
class Config(Views):
    path: str | None = None
    """The folder that the paths in the lists begin in, and the lists' own folder."""

    train: str = "train_list.txt"
    """The list to train on: a name in `path`, or an absolute path. A line is `images/a.jpg 3`."""

    test: str = "val_list.txt"
    """The list to evaluate on."""

    names: str | None = None
    """A file with the classes' names: a line is `0 tench`, or the name alone, in the order of the numbers."""

    separator: Literal["space", "tab", "comma"] = "space"
    """Stands between path and class. The last one of a line counts, so a path may contain it."""

    labels: Positive | None = None
    """Number of yes-or-no labels of each image, for the loss binary_cross_entropy: a line is `images/a.jpg 0,1,1`.
    null: one class."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.labels is not None and self.separator == "comma":
            raise ValueError(
                "separator: a comma stands between labels: take space or tab between path and labels"
            )

    def build(self, split: str) -> Images:
        """Targets int64, as in the list; with `labels` float32 [labels]. Without `names` a class or label is named by
        its number."""
        root = existing_path(self.path, "the folder in which the lists' paths begin")
        train = existing_path(str(root / self.train), "the list of images to train on", "train")
        test = existing_path(str(root / self.test), "the list of images to evaluate on", "test")
        images, learned = listed = self._read(train)
        held_out = self._read(test)
        if checked_split(split) == "train":
            _refuse_learned(held_out[0], images, test, train)
        else:
            listed = held_out
            if self.labels is None:
                refuse_unknown(listed[1], learned, test, train)
        classes = class_names(root, self.names, self.labels or int(learned.max()) + 1)
        return self.images(split, [root / file for file in listed[0]], listed[1], classes)

    def _read(self, path: Path) -> tuple[list[str], Array]:
        """The files and the labels of a list. Raises DataError for a line of another form, with its number."""
        files: list[str] = []
        labels: list[Any] = []
        for number, line in lines(path):
            file, _, label = line.rpartition(_SEPARATORS[self.separator])
            read = _class(label) if self.labels is None else _marks(label, self.labels)
            if not file.strip() or read is None:
                raise DataError(f"{path}:{number}: '{line[:80]}' is not {self._described()}")
            files.append(file.strip())
            labels.append(read)
        if not files:
            raise DataError(f"{path} lists no image")
        return files, np.array(labels, np.int64 if self.labels is None else np.float32)

    def _described(self) -> str:
        if self.labels is not None:
            return (
                f"a path, a {self.separator} and {self.labels} labels, each 0 or 1, with commas between them "
                "(dataset.labels; dataset.separator: space, tab)"
            )
        return (
            f"a path, a {self.separator} and the number of one class, 0 to {MOST_CLASSES - 1:,} (dataset.separator: "
            "space, tab or comma; of several labels in each line, their number is dataset.labels)"
        )


def _refuse_learned(held_out: list[str], learned: list[str], test: Path, train: Path) -> None:
    """Raises DataError for images that two lists name, of which it compares the names alone. One list in both settings
    is meant."""
    if train.resolve() != test.resolve() and (
        both := {*map(normpath, held_out)}.intersection(map(normpath, learned))
    ):
        raise DataError(
            f"{test} lists {min(both)}{and_more(both)}, and so does {train}: learned images score too well. Leave it "
            "out of one list"
        )


def _class(text: str) -> int | None:
    is_class = text.isdecimal() and len(text) <= 9 and int(text) < MOST_CLASSES
    return int(text) if is_class else None


def _marks(text: str, count: int) -> list[int] | None:
    """Yes-or-no labels, such as "0,1,1"."""
    marks = [mark.strip() for mark in text.split(",")]
    return [int(mark) for mark in marks] if len(marks) == count and {*marks} <= {"0", "1"} else None
