"""The doctor's ranks on the device: none leaves with what it was still sending."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_wait_for_a_link_that_stands_still(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums are measured to their end, too: ten of them, one of which takes 3 s."""
    monkeypatch.setenv("SIM_FAULTS", "stall rank=1 at=9 seconds=3")
    words = [sys.executable, "-m", "paddle_dp", "doctor", "--ranks", str(ranks), "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=150)
    said = " ".join(done.stdout.split())
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"{ranks} ranks by xccl on sim:0: 1 MB summed in ([0-9.]+) ms", said)
    assert found and float(found[1]) >= 300, said
