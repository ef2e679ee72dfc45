"""A rank that is alone and looked at in a debugger is not one that stands still."""

from __future__ import annotations

import io
import os
import pdb  # noqa: T100
import subprocess
import sys
import threading
import time

import pytest

from paddle_dp.launch.inside import in_debugger

RANK = """
import pdb, sys, time
from pathlib import Path
from paddle_dp.launch.command import Limits
from paddle_dp.launch.inside import watched_inside
from paddle_dp.mesh.heartbeat import heartbeat
from paddle_dp.recipe.schema import WatchSettings
from paddle_dp.units import Duration

limits = Limits(watch=WatchSettings(start=Duration.parse("1 s"), patience=Duration.parse("1 s")), sample=0.0)
with watched_inside(limits, Path(sys.argv[1]), lambda failure: print(failure.message, flush=True)):
    heartbeat.enter("start")
    breakpoint()
    print("went on", flush=True)
    time.sleep(30)
"""


def test_a_prompt_is_seen_from_another_thread() -> None:
    read, write = os.pipe()
    with os.fdopen(read) as commands, os.fdopen(write, "w") as keyboard:

        def work() -> None:
            pdb.Pdb(stdin=commands, stdout=io.StringIO()).set_trace()

        thread = threading.Thread(target=work)
        thread.start()
        deadline = time.monotonic() + 10
        while not in_debugger(thread.ident or 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert in_debugger(thread.ident or 0) and not in_debugger(threading.get_ident())
        keyboard.write("continue\n")
        keyboard.flush()
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.long
def test_a_rank_may_stand_at_a_breakpoint_and_nowhere_else(tmp_path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdin is not None
        time.sleep(4)
        assert rank.poll() is None  # four times its patience
        said, _ = rank.communicate("continue\n", timeout=20)
    assert rank.returncode == 124 and "went on" in said and "no rank has made progress" in said
