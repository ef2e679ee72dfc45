"""Stopped by kill -9 on the device, a run goes on bit for bit; a checkpoint goes from device to CPU and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.house.runs import saved_bits
from tests.house.training import build_trainer, kill_after, recorded
from tests.parity import train as trained
from tests.ranks import run_ranks
from tests.sim.recipes import GPT

TENSOR = "{use: hybrid, tensor: 2}"


def train(folder: str, killed_after: int = 0, resume: bool = False) -> list[list[float]]:
    """In a rank: trains with dropout from the device's own generator, saving after 3 of 5 steps; or kills itself."""
    words = ["train.dropout=own", "train.length=5 steps", "callbacks=[{use: checkpoint, every: 3 steps}]"]
    trainer = build_trainer(GPT, folder, f"strategy={TENSOR}", *words, resume=resume)
    rows = recorded(trainer)
    kill_after(trainer, killed_after)
    trainer.fit()
    return rows


@pytest.mark.long
def test_after_kill_9_the_device_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    rows = run_ranks(train, 2, str(whole))[0]
    with pytest.raises(AssertionError):
        run_ranks(train, 2, str(broken), 4)
    again = run_ranks(train, 2, str(broken), 0, True)[0]
    assert json.dumps(again) == json.dumps(rows[3:]), "from the checkpoint of step 3"
    assert saved_bits(broken) == saved_bits(whole)


@pytest.mark.long
def test_a_checkpoint_goes_from_the_device_to_the_cpu_and_back(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = run_ranks(trained, 1, str(tmp_path / "whole"), "{use: single}")
    folder, rows = str(tmp_path / "moved"), []
    rows += run_ranks(trained, 2, folder, TENSOR, "4 steps")[0]["rows"]
    monkeypatch.delenv("CUSTOM_DEVICE_ROOT")
    rows += run_ranks(trained, 1, folder, "{use: single}", "7 steps", True)[0]["rows"]
    monkeypatch.setenv("CUSTOM_DEVICE_ROOT", str(library))
    rows += run_ranks(trained, 2, folder, "{use: hybrid, sharding: 2}", "10 steps", True)[0]["rows"]
    losses = [[row[0] for row in each] for each in (rows, whole["rows"])]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
