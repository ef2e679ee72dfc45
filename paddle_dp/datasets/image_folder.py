"""Images in folders named after their classes, laid out as ImageNet: train/<class>/*.jpg and val/<class>/*.jpg."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paddle_dp.datasets._arrays import checked_split
from paddle_dp.datasets._images import Images, Views
from paddle_dp.datasets._paths import existing_path, inside
from paddle_dp.errors import DataError

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_TEST = ("val", "valid", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Config(Views):
    path: str | None = None
    """The folder that holds train/ and val/ (or valid/, validation/, test/)."""

    def build(self, split: str) -> Images:
        """Classes are numbered in the order of their folders' names; both splits must have the same classes."""
        root = existing_path(self.path, "a folder with train/<class>/ and val/<class>/ inside")
        train = inside(root, ("train",), "the images to train on")
        folder = (
            train if checked_split(split) == "train" else inside(root, _TEST, "the images to evaluate on")
        )
        classes = _classes(train)
        if folder != train and (differ := set(classes) ^ set(_classes(folder))):
            unshared = ", ".join(sorted(differ)[:8])
            raise DataError(f"{folder} and {train} have different classes: only one of them has {unshared}")
        files, labels = _files(folder, classes)
        return self.images(split, files, labels, classes)


def _classes(folder: Path) -> tuple[str, ...]:
    """The names of the class folders, sorted."""
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and entry.name[0] != ".")
    if not names:
        raise DataError(f"{folder} has no class folders: put the images of each class into a separate folder")
    return tuple(names)


def _files(folder: Path, classes: tuple[str, ...]) -> tuple[list[Path], np.ndarray]:
    """All images of all classes, sorted by name within a class, and their labels."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = sorted(
            Path(parent, file)
            for parent, _, names in os.walk(folder / name, followlinks=True)
            for file in names
            if file.lower().endswith(_SUFFIXES) and file[0] != "."
        )
        files += images
        labels += [label] * len(images)
    if not files:
        raise DataError(f"{folder} has class folders but not one image ({', '.join(_SUFFIXES)}) in them")
    return files, np.array(labels, dtype=np.int64)
