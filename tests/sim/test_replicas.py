"""Copies of a model in one process, each on a device of its own: one process without copies, to rounding."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.house.programs import run_python
from tests.parity import assert_same, train, truth
from tests.ranks import run_ranks

COPIES = "{use: replicas, count: 3}"


def trained(folder: str) -> dict[str, Any]:
    """In a rank of four devices: what it learned, and where each copy's weights, buffers and gradients lay."""
    os.environ |= {"FLAGS_selected_sims": "0,3,1,2"}  # as the launcher says it to one process
    from paddle_dp.strategies.replicas.replicas import Copies

    seen: dict[str, set[str]] = {}
    add_up = Copies._add_up

    def look(copies: Copies) -> None:
        for replica, device in zip([copies.model, *copies.replicas], copies.devices, strict=True):
            tensors = [*replica.parameters(), *replica.buffers()]
            tensors += [p.grad for p in replica.parameters() if p.grad is not None]
            seen.setdefault(device, set()).update(str(tensor.place) for tensor in tensors)
        add_up(copies)

    Copies._add_up = look
    found = train(folder, COPIES)
    return {**found, "places": {name: sorted(places) for name, places in seen.items()}}


@pytest.mark.long
def test_each_copy_computes_on_its_own_device_and_all_learn_what_one_process_learns(tmp_path: Path) -> None:
    found = run_ranks(trained, 1, str(tmp_path))
    assert found[0]["places"] == {f"sim:{number}": [f"Place(sim:{number})"] for number in (0, 3, 1)}
    assert_same(found, truth())


def started(*words: str, status: int = 0) -> Any:
    return run_python("-m", "paddle_dp", *words, timeout=180, status=status)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("more", ["", "train.precision=bfloat16", "strategy.devices=one"])
def test_a_proof_of_copies_on_their_devices(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With unequal parts, and dropout. (Autocast in bfloat16 is for types of device that Paddle knows.)"""
    monkeypatch.setenv("SIM_NAME", "npu")
    words = ["strategy.count=3", "train.batch=50", *filter(None, [more])]
    proof = started("verify", "configs/digits_replicas.yaml", "--ranks", "1", "--steps", "2", *words)
    assert "SAME: the parts of one process learn" in proof.stdout


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_job_gives_its_process_a_device_for_each_copy(tmp_path: Path) -> None:
    words = ["train", "configs/digits_replicas.yaml", "--out", str(tmp_path / "run"), "train.length=2 steps"]
    compiled = ["train.compile=true", "model.dropout=0"]  # each copy is traced on its own device
    done = started(*words, *compiled, "strategy.count=3", "--devices", "5,1,2")
    assert "1 rank on sim 5,1,2" in done.stdout and "on 1 process, sim:5" in done.stdout
    for more in (["strategy.count=9"], ["--devices", "1"]):
        refused = started(*words, *more, status=2)
        assert re.search(
            r"computes each of its \d copies on a separate one: set strategy.count", refused.stderr
        )
