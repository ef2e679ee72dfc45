"""A device that turns over one bit is found by computing the same gradients on all ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from paddle_dp.errors import ProcessorError
from tests.house.recipes import small_recipe
from tests.house.training import build_trainer
from tests.ranks import run_ranks

RECIPE = small_recipe(
    "length: 6 steps, batch: 12", model="mlp, inputs: 64, hidden: [16], classes: 10", optimizer="sgd",
    guard="{recompute: every 2 steps}", callbacks="[]",
)  # fmt: skip


def train(folder: str, faults: str) -> str:
    """In every rank: trains on the device, under faults. The error, if a processor is found."""
    os.environ["SIM_FAULTS"] = faults
    trainer = build_trainer(RECIPE, folder, seed=0)
    assert trainer.mesh.device.startswith("sim")
    try:
        trainer.fit()
    except ProcessorError as error:
        return str(error)
    return ""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_bit_that_turns_over_in_each_matmul_gradient_from_the_fifth_on_is_named(tmp_path: Path) -> None:
    """A step has two matmul_grad calls; those of the check after step 2 come after four of training."""
    always = "; ".join(f"flip rank=1 kernel=matmul_grad at={number} bit=20" for number in range(5, 40))
    said = run_ranks(train, 3, str(tmp_path), always, timeout=120)
    assert re.match(
        r"after step [24]: rank 1 \(.*\) computed other bits than the other data ranks", said[0]
    ), said
    assert len(set(said)) == 1
    assert run_ranks(train, 3, str(tmp_path), "", timeout=120) == [""] * 3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_one_bit_once_is_that_ranks_own(tmp_path: Path) -> None:
    found = [
        run_ranks(train, 2, str(tmp_path), f"flip rank=1 kernel=matmul_grad at={number} bit=20", timeout=120)[
            0
        ]
        for number in (5, 6)
    ]
    assert any(
        re.match(r"after step 2: rank 1 \(.*\) computed something else at the second", one) for one in found
    )
