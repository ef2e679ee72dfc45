"""A screen that cannot be written ends nothing: closed pipes, full disks, and what was printed meanwhile."""

from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path

import pytest

from paddle_dp.launch import steady
from paddle_dp.launch.steady import Kept, SteadyFile, steady_screen


def at(descriptor: int) -> type[SteadyFile]:
    """SteadyFiles that write to this descriptor, whichever they are made for."""

    class Here(SteadyFile):
        def __init__(self, number: int, kept: Kept | None = None):
            super().__init__(descriptor, kept)

    return Here


def printed_to(descriptor: int, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Prints to a standard output with this descriptor, within a steady screen."""
    stream = io.TextIOWrapper(io.FileIO(descriptor, "wb", closefd=False), line_buffering=True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(steady, "_is_own", lambda stream, number: number == 1)
    monkeypatch.setattr(steady, "SteadyFile", at(descriptor))
    with steady_screen():
        assert sys.stdout is not stream
        for line in lines:
            print(line, flush=True)


def test_a_closed_pipe_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    printed_to(write, monkeypatch, "one")
    assert os.read(read, 100) == b"one\n"
    os.close(read)
    printed_to(write, monkeypatch, "two", "three")
    os.close(write)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    printed_to(descriptor, monkeypatch, "one", "two")
    os.close(descriptor)


def test_what_a_full_disk_did_not_take_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    file, write = SteadyFile(descriptor), os.write
    file.write(b"one ")
    with monkeypatch.context() as disk:

        def full(number: int, content: bytes) -> int:
            raise OSError(28, os.strerror(28))

        disk.setattr(os, "write", full)
        file.write(b"two ")
        file.write(b"three ")
    assert write is os.write and (tmp_path / "log").read_bytes() == b"one "
    file.write(b"four")
    assert (tmp_path / "log").read_bytes() == b"one two three four"
    os.close(descriptor)


def test_what_is_kept_at_the_end_is_written_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    stream = io.TextIOWrapper(io.FileIO(descriptor, "wb", closefd=False), write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(steady, "_is_own", lambda stream, number: number == 1)
    monkeypatch.setattr(steady, "SteadyFile", at(descriptor))
    with steady_screen(), monkeypatch.context() as disk:

        def full(number: int, content: bytes) -> int:
            raise OSError(28, os.strerror(28))

        disk.setattr(os, "write", full)
        print("kept", flush=True)
        assert (tmp_path / "log").read_bytes() == b""
        disk.undo()
    assert (tmp_path / "log").read_bytes() == b"kept\n"
    os.close(descriptor)


def test_another_stream_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = io.StringIO()
    monkeypatch.setattr(sys, "stdout", mine)
    with steady_screen():
        assert sys.stdout is mine


def test_a_line_that_a_disk_took_in_part_is_not_broken_by_the_other_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor, kept, write = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), Kept(), os.write
    out, err = SteadyFile(descriptor, kept), SteadyFile(descriptor, kept)
    room = [7, 0]

    def little(number: int, content: bytes) -> int:
        if not (taken := min(room.pop(0), len(content))):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(number, content[:taken])

    with monkeypatch.context() as disk:
        disk.setattr(os, "write", little)
        err.write(b"not saved\n")
    out.write(b"step 31\n")
    os.close(descriptor)
    assert (tmp_path / "log").read_bytes() == b"not saved\nstep 31\n"
