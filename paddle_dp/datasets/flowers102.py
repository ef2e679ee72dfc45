"""Oxford's 102 flowers (Nilsback and Zisserman 2008) from a folder: 1020 images to train on, 6149 to test on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paddle_dp.datasets._arrays import Array, checked_split
from paddle_dp.datasets._images import Images, Views
from paddle_dp.datasets._matlab import read_integers
from paddle_dp.datasets._paths import existing_path, inside
from paddle_dp.errors import DataError

_PAGE = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102/"
_IDS = {"official": {"train": "trnid", "test": "tstid"}, "swapped": {"train": "tstid", "test": "trnid"}}


@dataclass(frozen=True, kw_only=True)
class Config(Views):
    path: str | None = None
    """A folder with jpg/ (102flowers.tgz unpacked), imagelabels.mat and setid.mat."""

    splits: Literal["official", "swapped"] = "official"
    """`swapped`: train on the 6149 images of the official test set and test on the 1020 of the official training
    set, as paddle.vision.datasets.Flowers and the classic PaddlePaddle examples do."""

    def build(self, split: str) -> Images:
        """Targets int64 0..101: the file's labels minus one."""
        root = existing_path(self.path, f"a folder with jpg/, imagelabels.mat and setid.mat, from {_PAGE}")
        images = inside(root, ("jpg",), "the folder that 102flowers.tgz unpacks to")
        labels = _column(root, "imagelabels.mat", "labels") - 1
        ids = _column(root, "setid.mat", _IDS[self.splits][checked_split(split)])
        if len(ids) == 0 or ids.min() < 1 or ids.max() > len(labels):
            raise DataError(f"{root}: setid.mat has numbers of images that imagelabels.mat does not label")
        files = [images / f"image_{number:05d}.jpg" for number in ids.tolist()]
        classes = tuple(f"flower {number}" for number in range(1, 103))
        return self.images(split, files, labels[ids - 1], classes)


def _column(root: Path, name: str, key: str) -> Array:
    """One list of numbers of a .mat file, int64 [n]."""
    return read_integers(inside(root, (name,), f"from {_PAGE}"), key)
