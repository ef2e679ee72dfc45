"""Two nodes of two ranks: each node has the model, split over its two ranks. Only gradients go between the nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.namespaces import ROOT, begin, end_of, finish, needs_root
from tests.faults.slow_run import losses
from tools.benchmark.forecast import Forecast

pytestmark = [pytest.mark.long, needs_root, pytest.mark.timeout(400)]
RECIPE = "configs/gpt_tiny.yaml"
WORDS = [
    "model.width=64", "model.length=64", "dataset.length=64", "train.batch=32", "train.micro_batches=1",
    "callbacks=[{use: metrics, every: 1 step}]",
]  # fmt: skip
SPLIT = "strategy={use: hybrid, tensor: 2}"
# Steps: joining and saving are the same in both runs, so the difference of their bytes is the exchange of 16 steps.
SHORT, LONG = 4, 20


def test_only_gradients_leave_a_node_whose_ranks_split_the_model(spaces: list[str], tmp_path: Path) -> None:
    _train_on_two_nodes(spaces, tmp_path / "short", SHORT)
    before = [_sent(space, node) for node, space in enumerate(spaces)]
    _train_on_two_nodes(spaces, tmp_path / "long", LONG)
    after = [_sent(space, node) for node, space in enumerate(spaces)]
    a_step = [(both - 2 * first) / (LONG - SHORT) for first, both in zip(before, after, strict=True)]

    exchange = Forecast.of(ROOT / RECIPE, [*WORDS, SPLIT], 4).exchange
    of_axis = {
        axis: [sum(each.bytes for each in exchange[rank] if each.axis == axis) for rank in range(4)]
        for axis in ("data", "tensor")
    }
    for node, crossing in enumerate(a_step):
        ranks = slice(2 * node, 2 * node + 2)
        gradients, activations = sum(of_axis["data"][ranks]), sum(of_axis["tensor"][ranks])
        print(
            f"node {node}: {crossing:,.0f} bytes a step leave it; its ranks send {gradients:,.0f} of gradients "
            f"and {activations:,.0f} of activations"
        )
        # Headers, acknowledgements, and the messages by which the ranks agree are the rest.
        assert gradients <= crossing < 1.15 * gradients
        assert activations > 8 * crossing

    command = [sys.executable, "-m", "paddle_dp", "train", RECIPE, "--ranks", "1", "--output-dir"]
    words = [str(tmp_path / "one"), *WORDS, f"train.length={LONG} steps"]
    subprocess.run([*command, *words], cwd=ROOT, check=True, capture_output=True, timeout=120)
    one, split = losses(tmp_path / "one"), losses(tmp_path / "long")
    assert len(one) == LONG and split == pytest.approx(one, rel=1e-5)


def _train_on_two_nodes(spaces: list[str], out: Path, steps: int) -> None:
    words, job = [*WORDS, SPLIT, f"train.length={steps} steps"], {"recipe": RECIPE, "ranks": 2}
    ended = finish([begin(space, node, out, "train", *words, job=job) for node, space in enumerate(spaces)])
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert "node 0 of 2, 2 ranks here" in ended[0][1]


def _sent(space: str, node: int) -> int:
    """Returns the bytes that have left a node over the cable."""
    inside = ["ip", "netns", "exec", space, "cat", "/proc/net/dev"]
    table = subprocess.run(inside, capture_output=True, text=True, check=True).stdout
    _, _, counts = next(
        row for row in table.splitlines() if row.strip().startswith(f"{end_of(node)}:")
    ).partition(":")
    return int(counts.split()[8])
