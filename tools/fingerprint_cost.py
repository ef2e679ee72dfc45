#!/usr/bin/env python
"""Measures the seconds that a data set's fingerprint takes at the start of a training, and the share that it reads.

python tools/fingerprint_cost.py
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paddle_dp.data.fingerprint import UNREAD, fingerprint
from paddle_dp.datasets._arrays import Arrays
from paddle_dp.datasets._windows import Windows
from paddle_dp.part import read_part


class Own:
    """A user's own data set: 40 000 samples in memory, one at a time."""

    def __init__(self) -> None:
        self.x = np.random.rand(40_000, 64).astype("float32")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], index % 10


def data_sets(folder: Path) -> Iterator[tuple[str, Any]]:
    """The data sets to measure, with names for the table."""
    from PIL import Image

    yield "digits, 1437 samples in memory", read_part("datasets", {"use": "digits"}).build("train")
    pixels = np.random.randint(0, 256, (50_000, 3, 32, 32), np.uint8)
    yield "50 000 images of 32 x 32 in memory, 154 MB", Arrays(pixels, np.arange(50_000) % 10)
    np.save(folder / "tokens.npy", np.random.randint(0, 50_000, 250_000_000).astype(np.uint16))
    tokens = np.load(folder / "tokens.npy", mmap_mode="r")
    yield "250 million tokens in a file, 500 MB, windows of 1024", Windows(tokens, 1024, (), None)  # type: ignore[arg-type]
    yield "an own data set without `take`, 40 000 samples", Own()
    for split, images in (("train", 2000), ("val", 10)):
        for number in range(images):
            place = folder / "images" / split / f"class_{number % 10}" / f"{number}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.random.randint(0, 256, (256, 320, 3), np.uint8)).save(place)
    part = read_part("datasets", {"use": "image_folder", "path": str(folder / "images")})
    yield "2000 JPEG files of 320 x 256, augmented", part.build("train")


def counted(found: dict[str, str], what: str) -> int:
    """The number of samples, or files, that the keys of a fingerprint cover."""
    keys = [key for key, text in found.items() if key.startswith(what) and not text.startswith(UNREAD)]
    groups = [re.search(r"\((\d+) of them\)", key) for key in keys]
    return sum(int(size[1]) if size else key.count(",") + 1 for key, size in zip(keys, groups, strict=True))


def main() -> None:
    print("| data set | seconds | samples read | names and sizes of files |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, dataset in data_sets(Path(folder)):
            began = time.perf_counter()
            found = fingerprint(dataset, 0)
            seconds, samples = time.perf_counter() - began, len(dataset)
            read, files = min(counted(found, "sample"), samples), min(counted(found, "file"), samples)
            share_of_files = f"{files / samples:.1%}" if files else ""
            print(f"| {name} | {seconds:.3f} | {read / samples:.1%} | {share_of_files} |")


if __name__ == "__main__":
    main()
