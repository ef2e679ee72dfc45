"""Images in folders named after their classes, laid out as ImageNet: train/<class>/*.jpg and val/<class>/*.jpg.

With `held_out` the class folders lie in `path` itself.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paddle_dp.datasets._arrays import checked_split, stratified
from paddle_dp.datasets._images import Images, Views
from paddle_dp.datasets._paths import MissingDataError, existing_path, inside
from paddle_dp.errors import DataError
from paddle_dp.text import and_more
from paddle_dp.units import Probability

_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
_TEST = ("val", "valid", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class Config(Views):
    path: str | None = None
    """The folder that holds train/ and val/ (or valid/, validation/, test/)."""

    held_out: Probability = 0.0
    """Share of each class's images to evaluate on, if `path` holds the class folders themselves. The choice depends on
    the files alone."""

    def build(self, split: str) -> Images:
        """Classes are numbered in the order of their folders' names; both splits must have the same classes."""
        root = existing_path(self.path, "a folder with train/<class>/ and val/<class>/ inside")
        names = _class_names(root)
        is_split = "train" in names and any(name in names for name in _TEST)
        if self.held_out:
            if is_split:
                raise DataError(
                    f"dataset.held_out is for class folders in path itself, and {root} holds train/"
                )
            return self._split(root, checked_split(split) == "test")
        if not is_split and len(names) > 1 and all(_holds_images(root / name) for name in names):
            raise MissingDataError(
                f"dataset.path: {root} holds class folders, and no train/ and val/: set dataset.held_out=0.2 to "
                "evaluate on a fifth of each class"
            )
        folder = train = inside(root, ("train",), "the images to train on")
        if checked_split(split) == "test":
            folder = inside(root, _TEST, "the images to evaluate on")
        classes = _classes(train)
        if folder != train and (differ := set(classes) ^ set(_classes(folder))):
            unshared = ", ".join(sorted(differ)[:8])
            raise DataError(f"{folder} and {train} have different classes: only one of them has {unshared}")
        files, labels = _files(folder, classes)
        return self.images(split, files, labels, classes)

    def _split(self, root: Path, test: bool) -> Images:
        classes = _classes(root)
        files, labels = _files(root, classes)
        is_test = stratified(labels, self.held_out, seed=0)
        if lacking := sorted({*range(len(classes))} - {*labels[~is_test].tolist()}):
            raise DataError(
                f"dataset.held_out={self.held_out:g} leaves no image to train on of class {classes[lacking[0]]}"
                f"{and_more(lacking)} in {root}: give each class two images or more, or set a smaller share"
            )
        chosen = np.flatnonzero(is_test == test)
        return self.images("test" if test else "train", [files[i] for i in chosen], labels[chosen], classes)


def _classes(folder: Path) -> tuple[str, ...]:
    """The names of the class folders, sorted."""
    if not (names := _class_names(folder)):
        raise DataError(f"{folder} has no class folders: put the images of each class into a separate folder")
    return names


def _class_names(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        return ()
    entries = os.scandir(folder)
    return tuple(sorted(entry.name for entry in entries if entry.is_dir() and entry.name[0] != "."))


def _holds_images(folder: Path) -> bool:
    return any(entry.name.lower().endswith(_SUFFIXES) for entry in os.scandir(folder))


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
