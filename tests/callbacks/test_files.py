"""Files: a small file that a disk does not take is said once, and written when there is room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paddle_dp.callbacks import _files
from paddle_dp.callbacks._files import Files
from tests.callbacks.moments import Capture


def test_what_a_disk_does_not_take_is_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    files, one, other = Files(), tmp_path / "run" / "evaluation.json", tmp_path / "run" / "confusion.png"

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as disk:
        disk.setattr(_files, "replace", full)
        files.write(one, b"first")
        files.write(one, b"second")
    assert not one.exists() and capsys.readouterr().err.count("was not written: No space left") == 1
    files.write(other, b"picture")
    assert one.read_bytes() == b"second" and other.read_bytes() == b"picture"
