"""Files made to harm who reads them: refused with their name, in little time and memory."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import struct
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from paddle_dp.datasets import cifar, image_folder
from paddle_dp.datasets.cifar import read_pickled
from paddle_dp.datasets.flowers102 import LARGEST, read_integers
from paddle_dp.errors import DataError

MB = 1 << 20


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """Fails if what is inside allocates more than `size` bytes at once."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size, f"{peak / MB:.0f} MB"


def mat(path: Path, arrays: dict[str, np.ndarray], *, packed: bool = False) -> bytes:
    from scipy.io import savemat

    savemat(path, arrays, do_compression=packed)
    return path.read_bytes()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["u1", "i2", "f4", "f8", ">i4", "u8"])
def test_matlab_files_of_every_kind_of_number_are_read(tmp_path: Path, kind: str, packed: bool) -> None:
    numbers = np.arange(1, 100).astype(kind)[None]
    mat(tmp_path / "a.mat", {"before": np.zeros((3, 3)), "ids": numbers, "after": np.ones(1)}, packed=packed)
    assert read_integers(tmp_path / "a.mat", "ids").tolist() == list(range(1, 100))
    with pytest.raises(DataError, match=r"a\.mat cannot be read: it holds no idz, but before, ids, after"):
        read_integers(tmp_path / "a.mat", "idz")


def test_a_matlab_bomb_is_not_unpacked(tmp_path: Path) -> None:
    whole = mat(tmp_path / "a.mat", {"labels": np.ones((1, 9))})
    bomb = zlib.compress(bytes(40 * MB), 6)
    (tmp_path / "bomb.mat").write_bytes(whole[:128] + struct.pack("<II", 15, len(bomb)) + bomb)
    with (
        at_most(4 * LARGEST),
        pytest.raises(DataError, match=r"bomb\.mat cannot be read: it unpacks to more than 16"),
    ):
        read_integers(tmp_path / "bomb.mat", "labels")
    (tmp_path / "long.mat").write_bytes(whole + bytes(LARGEST))
    with pytest.raises(DataError, match=r"long\.mat cannot be read: it is larger than 16 MB"):
        read_integers(tmp_path / "long.mat", "labels")


@pytest.mark.parametrize("packed", [False, True])
def test_a_damaged_matlab_file_never_ends_the_process(tmp_path: Path, packed: bool) -> None:
    """SciPy 1.15 ends with SIGSEGV on some files of this size."""
    whole, draw = mat(tmp_path / "a.mat", {"labels": np.ones((1, 30))}, packed=packed), random.Random(0)
    for _ in range(50):
        wrong = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            wrong[draw.randrange(124, len(wrong))] = draw.randrange(256)
        (tmp_path / "wrong.mat").write_bytes(
            bytes(wrong[: draw.choice([len(wrong), draw.randrange(len(wrong))])])
        )
        with suppress(DataError):
            read_integers(tmp_path / "wrong.mat", "labels")


def sparse(path: Path) -> None:
    """A member of 1 TB without a byte: tar's own way to store holes."""
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("test_batch")
        member.size = 1 << 40
        tar.addfile(member)


def zeros(path: Path) -> None:
    """600 MB in 600 KB, as one member of a .tar.gz."""
    with gzip.open(path, "wb", 9) as out:
        member = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        member.size = 255 * MB
        for _ in range(2):
            out.write(member.tobuf())
            for _ in range(255):
                out.write(bytes(MB))


def header(path: Path) -> None:
    """A header that is said to go on for 2 GB."""
    with gzip.open(path, "wb", 9) as out:
        member = tarfile.TarInfo("x")
        member.type, member.size = tarfile.XHDTYPE, 2 << 30
        out.write(member.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(300):
            out.write(bytes(MB))


@pytest.mark.parametrize("make", [sparse, pytest.param(zeros, marks=pytest.mark.long),
                                  pytest.param(header, marks=pytest.mark.long)])  # fmt: skip
def test_an_archive_that_unpacks_to_more_than_the_data_set_is_refused(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "cifar.tar.gz")
    with at_most(700 * MB), pytest.raises(DataError, match=r"cifar\.tar\.gz cannot be read as an archive"):
        cifar.Config(path=str(tmp_path / "cifar.tar.gz")).build("test")


def doubling(times: int, collect: bytes) -> bytes:
    """A pickle that puts what it made last twice into the next."""
    return b"".join(b"q\x00(h\x00h\x00" + collect for _ in range(times))


HOSTILE = {
    "lists in lists": (b"\x80\x02](K\x01e" + doubling(40, b"l") + b".", "a list holds other than numbers"),
    "a key of tuples": (
        b"\x80\x02)" + doubling(40, b"t") + b"q\x00(h\x00K\x01d.",
        "a dict has keys other than numbers",
    ),
    "a kind of tuples": (
        b"\x80\x02)" + doubling(40, b"t") + b"q\x00cnumpy\ndtype\n(h\x00tR.",
        "a tuple stands where a str belongs",
    ),
    "a far memo": (b"\x80\x02}q\x00r\xff\xff\xff\x7f]r\xff\xff\xff\x6f.", "holds a list, not a dict"),
    "few of many bytes": (b"\x80\x02B\xff\xff\xff\x7fabc.", "cannot be read"),
    "protocol 5": (pickle.dumps({"data": np.ones(3)}, protocol=5), "which no array needs"),
    "a dict in a dict": (pickle.dumps({"data": {"a": {}}}, protocol=2), "a dict holds other than arrays"),
    "a function": (pickle.dumps(print, protocol=2), r"it asks for (__builtin__|builtins)\.print"),
    "an array of any size": (b"\x80\x02cnumpy\nndarray\n(J\xff\xff\xff\x7ftR.", "as no array does"),
    "an end": (b".", "cannot be read"),
    "nothing": (b"", "cannot be read"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_stands_for_no_more_than_its_own_size(name: str) -> None:
    content, said = HOSTILE[name]
    with at_most(MB), pytest.raises(DataError, match=said):
        read_pickled(content, "a batch")


def test_a_pickle_of_too_many_operations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "MOST", 100)
    with pytest.raises(DataError, match="more than 100 operations"):
        read_pickled(b"]" * 101 + b".", "a batch")
    monkeypatch.setattr(cifar, "LARGEST", 1000)
    with pytest.raises(DataError, match="is larger than"):
        read_pickled(bytes(1001), "a batch")


@pytest.mark.parametrize("protocol", range(5))
def test_pickles_of_python_3_are_read_in_the_older_protocols(protocol: int) -> None:
    content = {
        "data": np.arange(24, dtype=">i2").reshape(4, 6), "columns": np.asfortranarray(np.ones((2, 3))),
        "labels": [1, 2, -3, 2**40, True, None, 1.5], "names": ["a", "é"], "by": b"\x00\xff",
    }  # fmt: skip
    read = read_pickled(pickle.dumps(content, protocol=protocol), "a batch")
    assert (
        read["labels"] == content["labels"]
        and read["names"] == content["names"]
        and read["by"] == content["by"]
    )
    for key in ("data", "columns"):
        assert (read[key] == content[key]).all() and read[key].shape == content[key].shape


def png(width: int, height: int) -> bytes:
    """A black picture of 1 bit a pixel."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    rows = zlib.compressobj(9)
    packed = b"".join(rows.compress(bytes(1 + -(-width // 8))) for _ in range(height)) + rows.flush()
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def folder(tmp_path: Path, content: bytes) -> image_folder.Config:
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        (tmp_path / split / "a" / "one.png").write_bytes(content)
    return image_folder.Config(path=str(tmp_path), size=8, resize=8)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_of_169_megapixels_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    data = folder(tmp_path, png(13_000, 13_000)).build("test")
    said = r"one\.png cannot be read as an image: ValueError: its 13000x13000 pixels are more than 89,478,485"
    with at_most(50 * MB), pytest.raises(DataError, match=said):
        data[0]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    (tmp_path / "val/a/one.png").write_bytes(png(10, 10))
    assert data[0][0].shape == (3, 8, 8)
    (tmp_path / "val/a/one.png").write_bytes(png(10, 11))
    with pytest.raises(DataError, match="10x11 pixels are more than 100"):
        data[0]


def test_a_format_whose_reader_runs_programs_is_no_image(tmp_path: Path) -> None:
    from PIL import Image

    page = io.BytesIO()
    Image.new("L", (4, 4)).save(page, "EPS")  # is read with Ghostscript
    with pytest.raises(DataError, match=r"one\.png cannot be read as an image: UnidentifiedImageError"):
        folder(tmp_path, page.getvalue()).build("test")[0]
