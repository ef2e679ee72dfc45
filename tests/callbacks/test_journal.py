"""Journal: whole entries, at once, and a full disk that ends nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paddle_dp.callbacks._journal import Journal


def test_entries_are_there_at_once_and_behind_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old ")
    journal = Journal(path)
    journal.add(b"one ")
    assert path.read_bytes() == b"old one "
    journal.add(b"two")
    assert path.read_bytes() == b"old one two"


def test_a_full_disk_leaves_no_half_entry_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal, write = Journal(tmp_path / "log"), os.write
    journal.add(b"whole ")
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, entry: write(file, entry[:3]))
        journal.add(b"torn")
        journal.add(b"torn")
    journal.add(b"after")
    assert (tmp_path / "log").read_bytes() == b"whole after"
    assert journal.lost == 2
    said = capsys.readouterr().err
    assert said.count("missing entries") == 1 and "No space left" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_refused_write_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(Path("/dev/full"))
    journal.add(b"entry")
    assert journal.lost == 1 and "No space left" in capsys.readouterr().err
