"""Lion, LARS, Adafactor and Muon in every layout against one process, and resumed in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddle_dp import optimizers
from tests.parity import LAYOUTS, SHORT, assert_same, assert_same_weights, train, train_each, truth
from tests.ranks import run_ranks

# The bias of a key changes no attention, so its gradient is rounding alone. Lion, Adafactor, and AdamW with a tiny
# epsilon step by a gradient's direction, whatever its size.
_FROZEN = "groups: [{match: '*.qkv.bias', frozen: true}]"
OPTIMIZERS = {
    "lion": f"{{use: lion, clip: 0.5, {_FROZEN}}}",
    "lars": "{use: lars, clip: 0.5, trust: 0.1}",
    "adafactor": f"{{use: adafactor, clip: 0.5, weight_decay: 0.1, {_FROZEN}}}",
    "muon": f"{{use: muon, clip: 0.5, adamw: [blocks.5.out], scale: match_rms, adamw_lr_scale: 1.0, {_FROZEN}}}",
}  # fmt: skip


# tests/parity.py and tests/axes try adamw in every layout, tests/axes/test_sharding.py the others.
ELSEWHERE = {"sgd", "momentum", "adamw", "lamb"}


def test_every_optimizer_of_the_shelf_is_tried_in_every_layout() -> None:
    shelf = Path(optimizers.__file__).parent.glob("[!_]*.py")
    assert {file.stem for file in shelf} == {*OPTIMIZERS, *ELSEWHERE}, "a new one needs a row in OPTIMIZERS"


def layouts(use: str) -> list[str]:
    return [strategy for name, strategy in LAYOUTS.items() if use == "lion" or name != "tensor"]


# Muon has the most to place: matrices, marks of the whole model, and AdamW's states.
QUICK = [pytest.param(use, marks=[] if use == "muon" else [pytest.mark.long]) for use in OPTIMIZERS]


@pytest.mark.parametrize("use", QUICK)
def test_every_layout_of_two_ranks_is_one_process(use: str, tmp_path: Any) -> None:
    optimizer = OPTIMIZERS[use]
    ranks = run_ranks(
        train_each, 2, str(tmp_path), layouts(use), optimizer=optimizer, until=SHORT, timeout=300
    )
    for many in zip(*ranks, strict=True):
        assert_same(many, truth(SHORT, optimizer=optimizer))


@pytest.mark.long
@pytest.mark.parametrize("use", OPTIMIZERS)
def test_three_ranks_are_one_process(use: str, tmp_path: Any) -> None:
    optimizer = OPTIMIZERS[use]
    strategies = [LAYOUTS["data"], "{use: hybrid, sharding: 3, sharding_stage: 3}"]
    ranks = run_ranks(train_each, 3, str(tmp_path), strategies, optimizer=optimizer, timeout=300)
    for many in zip(*ranks, strict=True):
        assert_same(many, truth(optimizer=optimizer))


@pytest.mark.parametrize("use", QUICK)
def test_it_goes_on_in_another_layout(use: str, tmp_path: Any) -> None:
    """From two ranks with sharded states to one process, and from there to two stages."""
    optimizer = OPTIMIZERS[use]
    how = {"optimizer": optimizer, "timeout": 300}
    run_ranks(train, 2, str(tmp_path), LAYOUTS["sharding 2"], "3 steps", **how)
    run_ranks(train, 1, str(tmp_path), "{use: single}", SHORT, True, **how)
    many = run_ranks(train, 2, str(tmp_path), LAYOUTS["pipeline"], "10 steps", True, **how)
    whole = truth(optimizer=optimizer)
    assert_same(many, whole | {"rows": whole["rows"][5:]})


@pytest.mark.parametrize("use", QUICK)
def test_a_resumed_run_has_the_bits_of_one_without_a_stop(use: str, tmp_path: Any) -> None:
    how = {"optimizer": OPTIMIZERS[use], "timeout": 300}
    run_ranks(train, 1, str(tmp_path), "{use: single}", "3 steps", **how)
    (resumed,) = run_ranks(train, 1, str(tmp_path), "{use: single}", "10 steps", True, **how)
    whole = truth(optimizer=OPTIMIZERS[use])
    assert resumed["rows"] == whole["rows"][3:]
    assert_same_weights(resumed["saved"], whole["saved"])
