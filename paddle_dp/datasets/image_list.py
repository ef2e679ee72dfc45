"""Images named by two text files, of the samples to train and to evaluate on: a line is a path and a class number.

Reads the lists of PaddleClas (`train_list.txt` of ImageNet: `n01440764/a.JPEG 0`), PaddleX and others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._images import Images, Views
from paddle_dp.datasets._labels import MOST_CLASSES, class_names, lines, refuse_unknown
from paddle_dp.datasets._paths import existing_path
from paddle_dp.errors import DataError

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

    def build(self, split: str) -> Images:
        """Targets int64, as in the list. Without `names` a class is named by its number."""
        root = existing_path(self.path, "the folder in which the lists' paths begin")
        train = existing_path(str(root / self.train), "the list of images to train on", "train")
        test = existing_path(str(root / self.test), "the list of images to evaluate on", "test")
        _, learned = listed = self._read(train)
        if checked_split(split) == "test":
            listed = self._read(test)
            refuse_unknown(listed[1], learned, test, train)
        classes = class_names(root, self.names, int(learned.max()) + 1)
        return self.images(split, [root / file for file in listed[0]], listed[1], classes)

    def _read(self, path: Path) -> tuple[list[str], Array]:
        """The files and the labels of a list. Raises DataError for a line of another form, with its number."""
        files: list[str] = []
        labels: list[int] = []
        for number, line in lines(path):
            file, _, label = line.rpartition(_SEPARATORS[self.separator])
            if not file.strip() or not label.isdecimal() or len(label) > 9 or int(label) >= MOST_CLASSES:
                raise DataError(
                    f"{path}:{number}: '{line[:80]}' is not a path, a {self.separator} and the number of one class, "
                    f"0 to {MOST_CLASSES - 1:,} (dataset.separator: space, tab or comma)"
                )
            files.append(file.strip())
            labels.append(int(label))
        if not files:
            raise DataError(f"{path} lists no image")
        return files, np.array(labels, np.int64)
