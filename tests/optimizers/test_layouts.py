"""Lion, LARS, Adafactor and Muon in every layout against one process, and resumed in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paddle_dp import optimizers
from tests import parity
from tests.parity import LAYOUTS, SHORT, assert_same, assert_same_weights, train, train_each, truth
from tests.ranks import run_ranks

# The bias of a key changes no attention, so its gradient is rounding alone. Lion, Adafactor, and AdamW with a tiny
# epsilon step by a gradient's direction, whatever its size.
_FROZEN = "groups: [{match: '*.qkv.bias', frozen: true}]"
OPTIMIZERS = {
    "lion": f"{{use: lion, clip: 0.5, {_FROZEN}}}",
    "lars": "{use: lars, clip: 0.5, trust: 0.1}",
    "adafactor": f"{{use: adafactor, clip: 0.5, weight_decay: 0.1, {_FROZEN}}}",
    "muon": f"{{use: muon, clip: 0.5, adamw: [blocks.3.out], scale: match_rms, adamw_lr_scale: 1.0, {_FROZEN}}}",
}  # fmt: skip


# tests/parity.py and tests/axes try adamw in every layout, tests/axes/test_sharding.py the others.
ELSEWHERE = {"sgd", "momentum", "adamw", "lamb"}


def test_every_optimizer_of_the_shelf_is_tried_in_every_layout() -> None:
    shelf = Path(optimizers.__file__).parent.glob("[!_]*.py")
    assert {file.stem for file in shelf} == {*OPTIMIZERS, *ELSEWHERE}, "a new one needs a row in OPTIMIZERS"


# Muon has the most to place: matrices, marks of the whole model, and AdamW's states.
QUICK = [pytest.param(use, marks=[] if use == "muon" else [pytest.mark.long]) for use in OPTIMIZERS]
MORE = parity.QUICK["more"]


def assert_one_process(use: str, ranks: int, folder: Any, strategies: list[str], **how: Any) -> None:
    how["optimizer"] = OPTIMIZERS[use]
    for many in zip(*run_ranks(train_each, ranks, str(folder), strategies, timeout=300, **how), strict=True):
        assert_same(many, truth(**how))


@pytest.mark.parametrize("use", QUICK)
def test_layouts_of_two_ranks_are_one_process(use: str, tmp_path: Any) -> None:
    layouts = [strategy for name, strategy in LAYOUTS.items() if use == "lion" or name != "tensor"]
    assert_one_process(use, 2, tmp_path, layouts, until=SHORT, more=MORE)


@pytest.mark.long
@pytest.mark.parametrize("use", OPTIMIZERS)
def test_three_ranks_are_one_process(use: str, tmp_path: Any) -> None:
    strategies = [LAYOUTS["data"], "{use: hybrid, sharding: 3, sharding_stage: 3}"]
    assert_one_process(use, 3, tmp_path, strategies, more=MORE)


@pytest.mark.parametrize("use", QUICK)
def test_it_goes_on_bit_for_bit_and_in_another_layout(use: str, tmp_path: Any) -> None:
    """From one process to one, and to two stages."""
    how: dict[str, Any] = {"optimizer": OPTIMIZERS[use], "more": MORE}
    one, whole = "{use: single}", truth(SHORT, **how)
    (begun,) = run_ranks(train, 1, str(tmp_path), one, "3 steps", **how)
    how["resume"] = begun["saved"]
    (resumed,) = run_ranks(train, 1, str(tmp_path / "one"), one, SHORT, **how)
    assert resumed["rows"] == whole["rows"][3:]
    assert_same_weights(resumed["saved"], whole["saved"])
    many = run_ranks(train, 2, str(tmp_path / "two"), LAYOUTS["pipeline"], SHORT, **how)
    assert_same(many, whole | {"rows": whole["rows"][3:]})


@pytest.mark.long
@pytest.mark.parametrize("use", OPTIMIZERS)
def test_it_goes_on_from_sharded_states(use: str, tmp_path: Any) -> None:
    """From two ranks with sharded states to one process, and from there to two stages."""
    how: dict[str, Any] = {"optimizer": OPTIMIZERS[use], "more": MORE}
    run_ranks(train, 2, str(tmp_path), LAYOUTS["sharding 2"], "3 steps", **how)
    run_ranks(train, 1, str(tmp_path), "{use: single}", SHORT, True, **how)
    many = run_ranks(train, 2, str(tmp_path), LAYOUTS["pipeline"], "10 steps", True, **how)
    whole = truth(**how)
    assert_same(many, whole | {"rows": whole["rows"][5:]})
