"""Log folders are private and fresh, and rank 0's words come whole."""

from __future__ import annotations

import io
import os
import stat

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.launch.logs import Follower, fresh, tail


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_every_attempt_has_its_own_private_folder(tmp_path):
    first, second = fresh(tmp_path / "runs" / "x"), fresh(tmp_path / "runs" / "x")
    assert [first.name, second.name] == ["attempt-001", "attempt-002"]
    assert [mode(first), mode(first.parent)] == [0o700, 0o700]
    assert mode(tmp_path / "runs/x") == 0o700
    (tmp_path / "runs/x/logs/attempt-041").mkdir()
    assert fresh(tmp_path / "runs" / "x").name == "attempt-042"


def test_a_folder_that_cannot_be_made_leaves_nothing_behind(tmp_path):
    deep = tmp_path / "new" / ("n" * 300) / "run"  # the name of the second is too long for a file system
    with pytest.raises(UsageError, match=r"logs cannot be written .*train has --output-dir DIR") as caught:
        fresh(deep)
    assert caught.value.exit_status == 2
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Not a directory"):
        fresh(tmp_path / "file" / "run")


@pytest.fixture
def log(tmp_path):
    return tmp_path / "workerlog.0"


def test_whole_lines_are_copied_as_they_come(log):
    screen = io.BytesIO()
    follower = Follower(log, screen)
    follower.copy(follower.size)  # not there yet
    log.write_bytes(b"one\ntw")
    follower.copy(follower.size)
    assert screen.getvalue() == b"one\n"
    with log.open("ab") as file:
        file.write(b"o\nthree")
    follower.copy(follower.size)
    assert screen.getvalue() == b"one\ntwo\n"
    follower.finish()
    assert screen.getvalue() == b"one\ntwo\nthree"


def test_nothing_is_copied_past_a_failure(log):
    screen = io.BytesIO()
    follower = Follower(log, screen)
    log.write_bytes(b"loss 1\n")
    said = follower.size
    with log.open("ab") as file:
        file.write(b"Traceback of a victim\n")
    follower.copy(said)
    assert screen.getvalue() == b"loss 1\n"


SIGTERM = b"""

--------------------------------------
C++ Traceback (most recent call last):
--------------------------------------
No stack trace in paddle, may be caused by external reasons.

----------------------
Error Message Summary:
----------------------
FatalError: `Termination signal` is detected by the operating system.
  [TimeInfo: *** Aborted at 1795261322 (unix time) try "date -d @1795261322" if you are using GNU date ***]
  [SignalInfo: *** SIGTERM (@0xb78) received by PID 2955 (TID 0x7fbf8a9e4b80) from PID 2936 ***]
"""


@pytest.mark.parametrize(
    "noise", [b"=== Modified FLAGS detected ===\nFLAGS(name='x')\nFLAGS(name='y')\n======\n", SIGTERM]
)
def test_what_paddle_says_of_itself_is_left_out(log, noise):
    screen = io.BytesIO()
    log.write_bytes(b"a\n" + noise + b"b\n")
    Follower(log, screen).finish()
    assert screen.getvalue().split() == [b"a", b"b"]
    assert tail(log).split() == ["a", "b"]


@pytest.mark.parametrize(
    "noise", [b"=== Modified FLAGS detected ===\nFLAGS(name='x')\nFLAGS(name='y')\n======\n", SIGTERM]
)
def test_it_is_left_out_too_if_it_comes_line_by_line(log, noise):
    screen = io.BytesIO()
    follower = Follower(log, screen)
    with log.open("ab", buffering=0) as file:
        for line in (b"a\n" + noise + b"b\nc").splitlines(keepends=True):
            file.write(line)
            follower.copy(follower.size)
    assert screen.getvalue().split() == [b"a", b"b"]
    follower.finish()
    assert screen.getvalue().split() == [b"a", b"b", b"c"]


def test_what_paddle_says_of_a_crash_is_kept(log):
    crash = SIGTERM.replace(b"Termination signal", b"Segmentation fault")
    log.write_bytes(crash)
    assert "Segmentation fault" in tail(log)
    screen = io.BytesIO()
    follower = Follower(log, screen)
    for end in range(0, len(crash) + 1, 7):
        follower.copy(end)
    follower.finish()
    assert screen.getvalue() == crash


def test_a_screen_that_is_gone_does_not_stop_anything(log):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb", buffering=0) as screen:
        follower = Follower(log, screen)
        log.write_bytes(b"one\n")
        follower.copy(4)
        follower.finish()
    assert follower.screen is None


def test_a_screen_whose_reader_is_stopped_is_not_waited_for(log):
    """`paddle-dp train … | less`: the supervisor stood in a write, and noticed no rank that failed or stood still."""
    said = b"".join(b"step %d: loss 0.5\n" % number for number in range(20_000))
    log.write_bytes(said)
    read, write = os.pipe()
    with os.fdopen(write, "wb") as screen, os.fdopen(read, "rb") as reader:
        follower = Follower(log, screen)
        follower.follow(len(said))  # returns
        assert 0 < follower.shown < len(said)
        seen = reader.read(follower.shown)
        for _ in range(100):
            before = follower.shown
            follower.follow(len(said))
            seen += reader.read(follower.shown - before)
        assert seen == said and follower.shown == len(said)
        follower.follow(len(said) + 1)  # more than there is


def test_what_is_on_the_screen_is_not_in_the_tail(log, tmp_path):
    """A rank that is killed has no more words than the screen has; one that crashes has its last ones."""
    log.write_bytes(b"step 10\nstep 20\nFatal")
    with (tmp_path / "screen").open("wb") as screen:
        follower, unseen = Follower(log, screen), Follower(log, None)
        follower.copy(1 << 20)
        unseen.copy(1 << 20)
    assert tail(log, since=follower.shown) == "Fatal"
    assert tail(log, since=unseen.shown) == "step 10\nstep 20\nFatal"


def test_the_tail_is_the_last_lines(log):
    assert tail(log) == ""
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert tail(log, 2) == "line 998\nline 999"
