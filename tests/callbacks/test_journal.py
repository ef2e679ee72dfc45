"""Journal: whole entries, at once, and a full disk that ends nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paddle_dp.callbacks import _files
from paddle_dp.callbacks._files import Journal
from tests.callbacks.moments import Capture


def test_entries_are_there_at_once_and_behind_the_old_ones(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old ")
    journal = Journal(path)
    journal.add(b"one ")
    assert path.read_bytes() == b"old one "
    journal.add(b"two")
    assert path.read_bytes() == b"old one two"


def test_a_full_disk_leaves_no_half_entry_is_said_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    journal, write = Journal(tmp_path / "log"), os.write
    journal.add(b"whole ")
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, entry: write(file, entry[:3]))
        journal.add(b"torn ")
        journal.add(b"torn too ")
        assert (tmp_path / "log").read_bytes() == b"whole "
    journal.add(b"after")
    assert (tmp_path / "log").read_bytes() == b"whole torn torn too after"
    del journal
    said = capsys.readouterr().err
    assert said.count("wait in memory") == 1 and "No space left" in said and "lacks" not in said


def test_more_than_memory_should_hold_loses_the_oldest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(_files, "_MAX_BYTES_WAITING", 10)
    journal, write = Journal(tmp_path / "log"), os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, entry: write(file, entry[:1]))
        for number in range(4):
            journal.add(b"four"[:3] + str(number).encode())
    journal.add(b"!")
    assert (tmp_path / "log").read_bytes() == b"fou2fou3!" and journal.lost == 2
    del journal
    assert "lacks 2 entries" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_refused_write_ends_nothing(capsys: Capture) -> None:
    journal = Journal(Path("/dev/full"))
    journal.add(b"entry")
    assert "No space left" in capsys.readouterr().err
    del journal
    assert "lacks 1 entries" in capsys.readouterr().err
