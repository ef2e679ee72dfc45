"""The doctor's ranks on the device: none leaves with what it was still sending."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.programs import run_python


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_wait_for_a_link_that_stands_still(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums are measured to their end, too: ten of them, one of which takes 3 s."""
    monkeypatch.setenv("SIM_FAULTS", "stall rank=1 at=9 seconds=3")
    words = ["-m", "paddle_dp", "doctor", "--ranks", str(ranks), "--out", tmp_path]
    said = " ".join(run_python(*words, timeout=150).stdout.split())
    found = re.search(rf"{ranks} ranks by xccl on sim:0: 1 MB summed in ([0-9.]+) ms", said)
    assert found and float(found[1]) >= 300, said
