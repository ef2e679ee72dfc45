"""A screen that cannot be written ends nothing: closed pipes, full disks, and what was printed meanwhile."""

from __future__ import annotations

import errno
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_dp import Trainer
from paddle_dp.launch import steady
from paddle_dp.launch.processes import alive
from paddle_dp.launch.steady import SteadyFile, steady_screen
from tests.house.command_service import command_line
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parent.parent.parent


def at(descriptor: int) -> type[SteadyFile]:
    """SteadyFiles that write to this descriptor, whichever they are made for."""

    class Here(SteadyFile):
        def __init__(self, number: int, kept: bytearray):
            super().__init__(descriptor, kept)

    return Here


def printed_to(descriptor: int, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Prints to a standard output with this descriptor, within a steady screen."""
    stream = io.TextIOWrapper(io.FileIO(descriptor, "wb", closefd=False), line_buffering=True)
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(steady, "_writes_to", lambda stream, number: number == 1)
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
    file, write = SteadyFile(descriptor, bytearray()), os.write
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
    monkeypatch.setattr(steady, "_writes_to", lambda stream, number: number == 1)
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
    descriptor, kept, write = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT), bytearray(), os.write
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


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("ranks", "closed"),
    [
        (2, "<&- >&- 2>&-"),
        (1, ">&-"),  # a process of its own, which ends as Python does
        (1, "| head -n 1"),  # a fork
        pytest.param(1, "2>&-", marks=pytest.mark.long),  # by default of what is no training, below
    ],
)
def test_a_training_without_standard_files_ends_well(tmp_path: Path, closed: str, ranks: int) -> None:
    start = command_line() if "|" in closed else [sys.executable, "-m", "paddle_dp"]
    words = f"{shlex.join(start)} train tests/faults/tiny.yaml train.length='40 steps'"
    callbacks = "{use: console, every: 1 step}, {use: checkpoint}"
    if ranks == 2:
        callbacks += f", {{use: tests.faults.killer.LeavesAChild, folder: {tmp_path}}}"
    words += f" callbacks='[{callbacks}]' --ranks {ranks}"
    script = f"set -o pipefail; {words} --output-dir {tmp_path / 'run'} {closed}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "checkpoints" / "step-00000040").is_dir()
    left = [int(path.read_text()) for path in tmp_path.glob("child.*")]
    assert len(left) == (2 if ranks == 2 else 0) and not any(map(alive, left))  # also where all is well


def train_without_output(folder: str) -> int:
    """In a rank: how many steps a trainer does in a process as `python own.py <&- >&-` is."""
    os.close(0)
    os.close(1)
    sys.stdin = sys.stdout = None
    data = [(np.full([4], i % 2, "float32"), i % 2) for i in range(64)]
    loss = paddle.nn.CrossEntropyLoss(reduction="none")
    trainer = Trainer.of(
        model=paddle.nn.Linear(4, 2), loss=loss, optimizer="adamw", train=data, batch=16, folder=folder
    )
    steps = trainer.fit("1 epoch").step
    sys.stdout = sys.stderr  # the fork says something at its end
    return steps


@pytest.mark.processes
def test_a_trainer_in_a_script_without_standard_output_trains(tmp_path: Path) -> None:
    assert run_ranks(train_without_output, 1, str(tmp_path / "run")) == [4]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "closed", "status"),
    [
        ("parts", ">&-", 0),
        pytest.param("check tests/faults/tiny.yaml", ">&-", 0, marks=pytest.mark.long),
        ("check tests/faults/no-such.yaml", "2>&-", 2),
    ],
)
def test_what_is_not_a_training_has_its_status_too(words: str, closed: str, status: int) -> None:
    """Each prints to the stream that is closed."""
    script = f"exec {sys.executable} -m paddle_dp {words} {closed}"
    assert subprocess.run(["bash", "-c", script], cwd=ROOT, timeout=60).returncode == status
