"""The blocks of docs/metrics.md: its recipe is one, and its own metrics give what they say, on two ranks, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.core.metric import Collected, Metric
from paddle_dp.mesh import Mesh
from paddle_dp.part import names
from paddle_dp.recipe import read_recipe
from tests.house.forked_commands import run_command
from tests.house.programs import ROOT

PAGE = (ROOT / "docs/metrics.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.S | re.M)
RANDOM = np.random.default_rng(2)


def files(folder: Path) -> None:
    for text in (text for kind, text in BLOCKS if kind == "python"):
        file = folder / text.partition("\n")[0].removeprefix("# ")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


def test_the_table_has_every_metric() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.M)
    assert sorted(rows) == names("metrics"), "docs/metrics.md has other rows than the shelf of metrics"


def test_the_keys_are_a_recipe_s(tmp_path: Path) -> None:
    keys = "".join(text for kind, text in BLOCKS if kind == "yaml")
    model = "model: {use: mlp}\ndataset: {use: digits}\nloss: {use: cross_entropy}\noptimizer: {use: sgd}\n"
    path = tmp_path / "recipe.yaml"
    path.write_text(f"{model}train: {{length: 1 steps, batch: 8}}\n{keys}")
    assert [part.name for part in read_recipe(path).metrics] == ["classification", "auc"]


def test_overlap() -> None:
    scope: dict[str, Any] = {}
    exec(next(text for kind, text in BLOCKS if "class Overlap" in text), scope)
    outputs, targets = RANDOM.standard_normal((5, 4, 4)).astype("float32"), RANDOM.random((5, 4, 4)) > 0.4
    collected = Collected(Metric(scope["Overlap"](), "metrics.Overlap"), 5)
    for rows in (slice(0, 2), slice(2, 5)):
        true = paddle.to_tensor(targets[rows].astype("float32"))
        micro_batch = MicroBatch(None, true, len(true), rows.start)
        collected.add(Batch((micro_batch,), 5, 0, 0), micro_batch, paddle.to_tensor(outputs[rows]), true)
    both, either = (outputs > 0) & targets, (outputs > 0) | targets
    expected = (both.sum((1, 2)) / either.sum((1, 2))).mean()
    alone = Mesh.alone()
    assert collected.scores(alone, collected.gathered(alone), {})["iou"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.processes
def test_kappa_of_a_recipe_on_two_ranks_chooses_the_best_checkpoint(tmp_path: Path) -> None:
    files(tmp_path)
    settings = [
        "train.length=1 epoch", "metrics=[{use: mine.scores.kappa, weights: linear}]",
        "callbacks=[{use: console}, {use: evaluate}, {use: checkpoint, best: kappa}]",
    ]  # fmt: skip
    recipe = ROOT / "configs/digits_mlp.yaml"
    shown = run_command(["train", str(recipe), "--ranks", "2", "--out", "run", *settings], tmp_path)
    assert re.search(r"held-out: loss \S+  acc1 \S+  acc5 \S+  kappa 0\.\d+", shown)
    assert "best.json" in {file.name for file in (tmp_path / "run/checkpoints").iterdir()}


def test_kappa() -> None:
    scope: dict[str, Any] = {}
    exec(next(text for kind, text in BLOCKS if "def kappa" in text), scope)
    outputs, targets = RANDOM.standard_normal((20, 4)), RANDOM.integers(4, size=20)
    metric = Metric(scope["kappa"], "metrics.kappa")
    assert metric.names == ("kappa",)
    from sklearn.metrics import cohen_kappa_score

    expected = cohen_kappa_score(targets, outputs.argmax(1), weights="quadratic")
    assert metric.scores({"outputs": outputs, "targets": targets}) == {"kappa": pytest.approx(expected)}
