"""What a command writes on its way is gone when it ends, however it ends."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from paddle_dp.launch.scratch import remove_abandoned, scratch_folder

WRITES = """
import sys, time
from paddle_dp.errors import EndedError
from paddle_dp.launch.scratch import scratch_folder
try:
    with scratch_folder("paddle-dp-test-") as folder:
        (folder / "much").write_text("x" * 1000)
        print(folder, flush=True)
        time.sleep(60)
except EndedError as ended:
    sys.exit(ended.exit_status)
"""


def writer(tmp_path):
    found = subprocess.Popen(
        [sys.executable, "-c", WRITES],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    return found, Path(found.stdout.readline().strip())


def test_a_command_that_somebody_ends_takes_its_folder_along(tmp_path):
    process, folder = writer(tmp_path)
    assert (folder / "much").exists()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    assert not folder.exists()


def test_what_a_killed_one_left_goes_with_the_next_and_what_is_in_use_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, left = writer(tmp_path)
    killed.kill()
    killed.wait(10)
    running, held = writer(tmp_path)  # which has looked already, and removed it
    assert not left.exists()
    (tmp_path / "paddle-dp-test-mine").mkdir()
    remove_abandoned("paddle-dp-test-")
    assert held.exists() and (tmp_path / "paddle-dp-test-mine").exists()
    running.kill()
    running.wait(10)
    time.sleep(0.05)
    with scratch_folder("paddle-dp-test-") as folder:
        assert folder.exists() and not held.exists()
    assert not folder.exists()


def test_a_folder_that_is_being_made_is_not_taken_for_a_killed_ones(tmp_path, monkeypatch):
    lock = fcntl.flock

    def lock_after_a_sweep(file, mode):
        if mode == fcntl.LOCK_EX:  # another command begins at this moment
            remove_abandoned("paddle-dp-test-", tmp_path)
        lock(file, mode)

    monkeypatch.setattr(fcntl, "flock", lock_after_a_sweep)
    with scratch_folder("paddle-dp-test-", tmp_path) as folder:
        assert folder.exists()


def test_the_signals_are_what_they_were():
    before = signal.getsignal(signal.SIGTERM)
    with scratch_folder("paddle-dp-test-"):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
