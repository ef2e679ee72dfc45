from __future__ import annotations

import os
import zlib

import pytest

from paddle_dp.checkpoint import disk
from paddle_dp.checkpoint.disk import Digest, digest_of, replace, write


def test_the_seal_of_what_was_written_is_the_seal_of_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_CHUNK", 7)
    parts = [b"", b"x" * 20, memoryview(b"y" * 7)]
    digest = write(tmp_path / "f", parts)
    assert digest == digest_of(tmp_path / "f") == Digest(27, zlib.crc32(b"".join(parts)))


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    class Slow:
        def __init__(self, file):
            self.file, self.fileno = file, file.fileno

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, chunk):
            return self.file.write(chunk[:3])

    monkeypatch.setattr(disk, "open", lambda *a, **k: Slow(open(*a, **k)), raising=False)  # noqa: SIM115
    write(tmp_path / "f", [b"0123456789"])
    assert (tmp_path / "f").read_bytes() == b"0123456789"


def test_an_existing_file_is_never_written_over(tmp_path):
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write(tmp_path / "f", [b"new"])
    assert (tmp_path / "f").read_bytes() == b"old"


def test_everything_is_flushed_to_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda f: flushed.append(os.readlink(f"/proc/self/fd/{f}")))
    replace(tmp_path / "best.json", b"{}")
    assert len(flushed) == 2 and flushed[1] == str(tmp_path), flushed


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "secret").write_bytes(b"x")
    (tmp_path / "f").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        digest_of(tmp_path / "f")


def test_a_replacement_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    replace(tmp_path / "best.json", b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace(tmp_path / "best.json", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["best.json"]
    assert (tmp_path / "best.json").read_bytes() == b"old"
