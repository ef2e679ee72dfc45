"""Files appear whole or not at all, also after a kill."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from paddle_dp.files import FORSAKEN, remove_partials, replacing


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")

    def fail() -> None:
        with replacing(tmp_path / "a.json") as partial:
            partial.write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_half_written_files_of_killed_processes_are_removed_and_no_other(tmp_path: Path) -> None:
    kept = [".gitignore", ".my.partial-notes", "a.partial-1-0123abcd", "certificate.json"]
    for name in (half_file(tmp_path, ended_pid()), *kept[:3]):
        (tmp_path / name).write_text("x")
    remove_partials(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_half_written_files_of_living_processes_stay(tmp_path: Path) -> None:
    """`paddle-dp report RUN` failed if a training in this folder began just then."""
    mine, ended = half_file(tmp_path, os.getppid()), half_file(tmp_path, ended_pid())
    other = int(ended.name[-8:], 16) ^ 0x10000  # of another machine
    elsewhere, killed_elsewhere = (ended.with_name(f"{ended.name[:-8]}{n:08x}") for n in (other, other ^ 1))
    for path in (mine, ended, elsewhere, killed_elsewhere):
        path.write_text("x")
    os.utime(killed_elsewhere, (time.time(), time.time() - FORSAKEN - 9))
    remove_partials(tmp_path)
    assert set(tmp_path.glob(".*")) == {mine, elsewhere}


def half_file(folder: Path, pid: int) -> Path:
    """Returns the name that a process of this machine gives to the half of a file."""
    with replacing(folder / "certificate.json") as partial:
        partial.write_text("{")
        return partial.with_name(partial.name.replace(f"-{os.getpid()}-", f"-{pid}-"))


def ended_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid
