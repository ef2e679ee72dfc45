"""Measures how fast samples are read: JPEGs beside other loaders, and tokens beside a copy in memory.

    python tools/benchmark/loader.py                          # beside paddle.io.DataLoader
    python tools/benchmark/loader.py --torch PYTHON           # and torch.utils.data.DataLoader of that Python
    python tools/benchmark/loader.py --tar --torch PYTHON     # a tar file of them, beside webdataset's loader there
    python tools/benchmark/loader.py --tokens                 # tokens of a memory-mapped file

2000 JPEGs of noise that looks like a photo, 256 × 256, are made on the spot. Each is decoded by Pillow, cropped at
random to 224 × 224, flipped at random, and stacked to batches of float32. The loaders read all of them in turns, in an
order that changes from round to round, with as many workers; the consumer does nothing. Told are images per second and
worker, and medians of the ratios within a round, which other programs hardly change.

--tar also reads them from one tar file, by the index of `tar_files`, and in PYTHON, where webdataset is installed, by
its loader, in the archive's order through a buffer of 1000 samples. Decoding and crop are the same function for all.

--tokens reads batches of windows of a file of 2-byte tokens, inputs and targets as int64, through the loader and by the
data set alone; the plain copy is NumPy's, of as many tokens that lie one after the other, into two arrays that are
there. malloc keeps memory, as paddle-dp lets it in its ranks.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from PIL import Image

from paddle_dp.launch.command import MALLOC
from tools.benchmark.compute import start_with
from tools.benchmark.turns import ratio
from tools.command_line import parser_of, why_no_import

SIZE, CROP = 256, 224
Epoch = Callable[[], int]
"""Reads all images once, and returns how many."""


class Jpegs:
    """Images of a folder: decoded, cropped and flipped at random; float32 [3, 224, 224] and a label."""

    def __init__(self, folder: str):
        self.files = sorted(str(path) for path in Path(folder).glob("*.jpg"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return cropped(self._source(index)), np.int64(index % 10)

    def _source(self, index: int) -> Any:
        return self.files[index]


def cropped(source: Any) -> np.ndarray:
    """float32 [3, 224, 224] of an image file."""
    with Image.open(source) as file:
        image = file.convert("RGB")
    x, y = random.randint(0, SIZE - CROP), random.randint(0, SIZE - CROP)
    image = image.crop((x, y, x + CROP, y + CROP))
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels: np.ndarray = np.asarray(image, dtype=np.float32).transpose(2, 0, 1) / np.float32(255)
    return pixels


def make(folder: Path, count: int) -> None:
    """Smooth noise with an edge in it: about as many bytes as a photo of that size."""
    draw = np.random.RandomState(0)
    for number in range(count):
        coarse = Image.fromarray(draw.randint(0, 255, (32, 32, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((SIZE, SIZE), Image.Resampling.BICUBIC)).astype(int)
        pixels = pixels + draw.randint(-12, 12, pixels.shape)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{number:05}.jpg", quality=88)


def of_paddle_dp(data: Any, batch: int, workers: int) -> Epoch:
    from paddle_dp.data import Loader

    loader, epochs = Loader.plain(data, batch, num_workers=workers, drop_last=True), iter(range(10**6))

    def epoch() -> int:
        return sum(one.micro_batches[0].inputs.shape[0] for one in loader.read(next(epochs)))

    return epoch


def of_data_loader(kind: Any, data: Any, batch: int, workers: int, **order: bool) -> Epoch:
    """By Paddle's DataLoader or PyTorch's."""
    loader = kind(data, batch_size=batch, num_workers=workers, persistent_workers=workers > 0, **order)
    return lambda: sum(inputs.shape[0] for inputs, _ in loader)


def of_paddle(data: Any, batch: int, workers: int) -> Epoch:
    import paddle

    class Data(paddle.io.Dataset):
        def __len__(self) -> int:
            return len(data)

        def __getitem__(self, index: int) -> Any:
            return data[index]

    return of_data_loader(paddle.io.DataLoader, Data(), batch, workers, shuffle=True, drop_last=True)


def of_torch(data: Any, batch: int, workers: int) -> Epoch:
    import torch

    return of_data_loader(torch.utils.data.DataLoader, data, batch, workers, shuffle=True, drop_last=True)


class Packed(Jpegs):
    """The same images in a tar file, by our index and in any order."""

    def __init__(self, archive: str, cache: str):
        from paddle_dp.datasets._tars import TarShards, shard_index

        self.files = [archive]
        self._index = shard_index([Path(archive)], None, "cls", cache)
        self._shards = TarShards([Path(archive)])

    def __len__(self) -> int:
        return len(self._index)

    def _source(self, index: int) -> Any:
        row = self._index[index]
        return io.BytesIO(self._shards.read(int(row["shard"]), int(row["offset"]), int(row["size"])))


def pack(folder: Path, archive: Path) -> None:
    """Writes the images and their classes as webdataset does."""
    with tarfile.open(archive, "w") as tar:
        for number, file in enumerate(sorted(folder.glob("*.jpg"))):
            tar.add(file, file.name)
            label = tarfile.TarInfo(f"{file.stem}.cls")
            label.size = len(content := str(number % 10).encode())
            tar.addfile(label, io.BytesIO(content))


def of_webdataset(archive: str, batch: int, workers: int) -> Epoch:
    import torch
    import webdataset

    def sample(pair: tuple[bytes, bytes]) -> tuple[np.ndarray, np.int64]:
        return cropped(io.BytesIO(pair[0])), np.int64(int(pair[1]))

    # One archive goes to one worker unless its samples are split among them.
    data = webdataset.WebDataset(archive, shardshuffle=False, nodesplitter=None, workersplitter=None)
    split = (
        webdataset.split_by_worker if hasattr(webdataset, "split_by_worker") else (lambda samples: samples)
    )
    data = data.compose(split).shuffle(1000).to_tuple("jpg", "cls").map(sample)
    return of_data_loader(torch.utils.data.DataLoader, data, batch, workers)


def serve(folder: str, batch: int, workers: int) -> None:
    """In the Python that has torch: reads an epoch for each line on stdin, and prints how many images it had."""
    is_tar = folder.endswith(".tar")
    epoch = of_webdataset(folder, batch, workers) if is_tar else of_torch(Jpegs(folder), batch, workers)
    for _ in sys.stdin:
        print(epoch(), flush=True)


def elsewhere(python: str, folder: str, batch: int, workers: int) -> Iterator[Epoch]:
    """torch's loader in a process of its own, which waits between two epochs."""
    words = [python, __file__, "--serve", folder, "--batch", str(batch), "--workers", str(workers)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def epoch() -> int:
            stdin.write("go\n")
            stdin.flush()
            return int(stdout.readline())

        yield epoch
        process.terminate()  # its end of stdin is open in the workers of the others, too


def images(count: int, batch: int, workers: int, rounds: int, python: str | None, tar: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="jpegs-") as folder:
        make(Path(folder), count)
        size = sum(path.stat().st_size for path in Path(folder).iterdir()) / count
        print(
            f"{count} JPEGs of {size / 1024:.0f} KiB, batches of {batch}, {workers} workers, {rounds} rounds"
        )
        data = Jpegs(folder)
        epochs = {
            "paddle_dp": of_paddle_dp(data, batch, workers), "paddle.io.DataLoader": of_paddle(data, batch, workers),
        }  # fmt: skip
        archive = Path(folder) / "images.tar"
        if tar:
            pack(Path(folder), archive)
            epochs["paddle_dp, tar file"] = of_paddle_dp(Packed(str(archive), folder), batch, workers)
        processes = []
        for name, module, source in (
            ("torch.utils.data.DataLoader", "torch", folder), ("webdataset, tar file", "webdataset", str(archive)),
        ):  # fmt: skip
            if python and (module == "torch" or tar) and not why_no_import(python, module):
                processes.append(elsewhere(python, source, batch, workers))
                epochs[name] = next(processes[-1])
        for epoch in epochs.values():
            epoch()  # workers start, files come into the cache
        speeds: dict[str, list[float]] = {name: [] for name in epochs}
        order = list(epochs)
        for _ in range(rounds):
            order = [*order[1:], order[0]]
            for name in order:
                began = time.perf_counter()
                read = epochs[name]()
                speeds[name].append(read / (time.perf_counter() - began) / max(workers, 1))
        for name, found in speeds.items():
            faster = ratio(speeds["paddle_dp"], found)
            print(f"  {name:<28}{statistics.median(found):8.0f} images/s a worker; paddle_dp: {faster:.3f} ×")
        for process in processes:
            next(process, None)


def tokens(batch: int, length: int, rounds: int) -> None:
    from paddle_dp.data import Loader
    from paddle_dp.datasets._windows import Windows

    with tempfile.TemporaryDirectory(prefix="tokens-") as folder:
        file = Path(folder) / "tokens.npy"
        np.save(file, np.random.RandomState(0).randint(0, 50_000, 64 << 20, dtype=np.uint16))
        mapped = np.load(file, mmap_mode="r")
        data = Windows(mapped, length, (), cast(Any, None))  # reading needs no tokenizer
        loader = Loader.plain(data, batch, drop_last=True)
        order = np.random.RandomState(1).permutation(len(data))
        starts = range(0, len(order) - batch, batch)
        inputs, targets = np.empty((2, batch, length), np.int64)
        epochs = iter(range(10**6))

        def copy() -> int:
            for first in starts:
                begin, end = first * length, (first + batch) * length
                np.copyto(inputs.reshape(-1), mapped[begin:end])
                np.copyto(targets.reshape(-1), mapped[begin + 1 : end + 1])
            return len(starts)

        def alone() -> int:
            for first in starts:
                data.take(order[first : first + batch])
            return len(starts)

        ways: dict[str, Callable[[], int]] = {
            "plain copy": copy,
            "data set": alone,
            "loader": lambda: sum(1 for _ in loader.read(next(epochs))),
        }
        print(f"128 MB of tokens, {batch} windows of {length} a batch, {rounds} rounds")
        speeds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(rounds + 1):
            for name, way in ways.items():
                began = time.perf_counter()
                batches = way()
                seconds = time.perf_counter() - began
                if number:
                    speeds[name].append(batches * batch * length / seconds / 1e6)
        for name, found in speeds.items():
            speed = statistics.median(found)
            share = ratio(found, speeds["plain copy"])
            print(
                f"  {name:<12}{speed:8.0f} million tokens/s, {16 * speed:7.0f} MB/s, {share:.2f} of the copy"
            )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=2000, help="JPEGs (default 2000)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a window")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--torch", metavar="PYTHON", help="a Python with torch and Pillow")
    parser.add_argument("--tar", action="store_true", help="read from a tar file, too")
    parser.add_argument("--tokens", action="store_true", help="read tokens instead")
    parser.add_argument("--serve", metavar="DIR", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.batch, given.workers)
        return
    if not MALLOC.keys() <= os.environ.keys():
        start_with(MALLOC)
    if given.tokens:
        tokens(given.batch, given.length, given.rounds)
    else:
        images(given.count, given.batch, given.workers, given.rounds, given.torch, given.tar)


if __name__ == "__main__":
    main()
