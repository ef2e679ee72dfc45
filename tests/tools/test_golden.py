"""tools/golden.py sees one bit of one number, and one word of one message; and says where."""

from __future__ import annotations

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.golden.cases import CASES, RECIPES
from tests.golden.comparison import differences, renamed, reworded
from tests.golden.lane import Lanes
from tools import golden

RECORD: dict[str, Any] = {
    "case": "data after",
    "commands": [{"command": "train", "status": 0, "stdout": ["step 1 loss 0.7", "done"], "stderr": []}],
    "metrics": {
        "step": {"gradient_norm": [1.5, 1.25], "loss": [0.75, 0.5], "lr": [0.1, 0.1], "time": None},
        "evaluated": {"loss": [0.625]},
    },
    "evaluation": {"loss": 0.625, "per_class.0.f1": 0.5},
    "recipe": ["# Resolved", "name: mlp", "strategy: {use: data_parallel, exchange: after}"],
    "files": ["metrics.jsonl", "recipe.yaml"],
    "checkpoint": {
        "name": "step-2",
        "tensors": {"model/a.weight": "float32[2] 01", "optimizer/a.weight/moment1": "float32[2] 02"},
        "placement": {"model/a.weight": ["rank-0 [0] [2]"]},
        "own": {"rank-0": {"rng": "03"}},
        "state": {"progress.step": 2, "rates": [0.1, 0.1]},
        "manifest": ["format"],
    },
}


def changed(*place: Any, to: Any) -> dict[str, Any]:
    record = copy.deepcopy(RECORD)
    part = record
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = to
    return record


CHANGES: tuple[tuple[dict[str, Any], str], ...] = (
    (
        changed("metrics", "step", "gradient_norm", to=[1.5, float(np.nextafter(1.25, 2))]),
        "metrics · step · gradient_norm, step 2: was 1.25 and is 1.2500000000000002 (1.8e-16 apart)",
    ),
    (changed("metrics", "step", "ema_loss", to=[1.0]), "metrics · step · ema_loss was absent and is [1.0]"),
    (changed("commands", 0, "status", to=1), "status of command 1 was 0 and is 1"),
    (
        changed("commands", 0, "stdout", to=["step 1 loss 0.7", "gone"]),
        "stdout of command 1, line 2: was 'done' and is 'gone'",
    ),
    (changed("checkpoint", "tensors", "model/a.weight", to="float32[2] 05"), "checkpoint · tensors · model"),
    (changed("checkpoint", "tensors", "optimizer/a.weight/moment1", to="float64[2] 02"), "tensors · optimizer/"),
    (changed("checkpoint", "placement", "model/a.weight", to=["rank-1 [0] [2]"]), "checkpoint · placement"),
    (changed("checkpoint", "own", "rank-0", "rng", to="04"), "checkpoint · own · rank-0 · rng"),
    (changed("checkpoint", "state", "rates", to=[0.1, 0.2]), "checkpoint · state · rates"),
    (changed("recipe", 2, to="strategy: {use: data_parallel}"), "recipe"),
    (changed("files", to=["metrics.jsonl"]), "files"),
    (changed("evaluation", "per_class.0.f1", to=0.25), "evaluation · per_class.0"),
)  # fmt: skip


@pytest.mark.parametrize(("record", "sentence"), CHANGES, ids=[sentence for _, sentence in CHANGES])
def test_each_kind_of_change_is_seen(record: dict[str, Any], sentence: str) -> None:
    assert differences(RECORD, RECORD) == []
    (said,) = differences(RECORD, record)
    assert sentence in said


def test_the_first_step_that_differs_is_said_first_and_a_loss_before_what_follows_from_it() -> None:
    record = changed("metrics", "step", "loss", to=[0.75, 0.25])
    record["metrics"]["step"] |= {"gradient_norm": [1.5, 1.0], "lr": [0.1, 0.2]}
    record["commands"][0]["stdout"] = []
    assert [each.split(",")[0] for each in differences(RECORD, record)] == [
        "metrics · step · loss", "metrics · step · gradient_norm", "metrics · step · lr", "stdout of command 1",
    ]  # fmt: skip
    record["metrics"]["step"]["lr"] = [0.2, 0.1]
    assert differences(RECORD, record)[0].startswith("metrics · step · lr, step 1")


def test_a_renamed_word_is_no_difference() -> None:
    record = json.loads(
        json.dumps(RECORD).replace("exchange: after", "reduction: after").replace("lr", "rate")
    )
    assert len(differences(RECORD, record)) == 3
    assert differences(RECORD, renamed(record, {"exchange": "reduction", "lr": "rate"})) == []
    assert reworded("strategy.exchange=after exchanged", "exchange", "sum") == "strategy.sum=after exchanged"
    assert differences(RECORD, renamed(record, {"exchange": "reduction", "lr": "rat"}))


def test_the_cases_that_differ_are_named_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert golden.report([RECORD], [RECORD], {}) == 0
    assert "1 of 1 cases are the same" in capsys.readouterr().out
    again = {**RECORD, "case": "again"}
    assert golden.report([RECORD, again], [changed("commands", 0, "status", to=1), again], {}) == 1
    assert capsys.readouterr().out.splitlines() == [
        "data after: status of command 1 was 0 and is 1",
        "1 of 2 cases are the same, bit for bit; 1 differ",
    ]


def test_a_tree_without_a_seam_is_an_error_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its lanes ended, and the cases waited for a free one for ever."""
    (tmp_path / "paddle_dp" / "launch").mkdir(parents=True)
    for module in ("__init__.py", "launch/__init__.py", "launch/start.py"):
        (tmp_path / "paddle_dp" / module).touch()
    with pytest.raises(SystemExit):
        Lanes(tmp_path, tmp_path, 2, {"PATH": os.environ["PATH"]})
    assert "add a pair of names to SEAMS" in capfd.readouterr().err


def test_every_strategy_has_a_case() -> None:
    assert len({case.name for case in CASES}) == len(CASES) and {case.recipe for case in CASES} == set(
        RECIPES
    )
    shelf = {
        path.stem for path in (golden.ROOT / "paddle_dp" / "strategies").iterdir() if path.stem[0] != "_"
    }
    words = " ".join(word for case in CASES for word in (*case.settings, *case.commands))
    assert [name for name in shelf if f"use: {name}" not in words and f"use={name}" not in words] == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.processes
def test_one_bit_of_a_gradient_and_one_word_of_a_message(tmp_path: Path) -> None:
    """A copy of the tree whose first Linear has, on rank 1 alone, gradients larger by a factor of 1 + 2⁻²³."""
    for folder in ("paddle_dp", "models"):
        shutil.copytree(golden.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    model = tmp_path / "models" / "mlp.py"
    model.write_text(f"{model.read_text()}\n{NUDGE}")
    messages = [file for file in (tmp_path / "paddle_dp").rglob("*.py") if "Did you mean" in file.read_text()]
    for file in messages:
        file.write_text(file.read_text().replace("Did you mean", "Do you mean"))
    cases = [case for case in CASES if case.name in ("data after", "unknown key")]
    before, after, again = (golden.run_cases(cases, tree, 2) for tree in (golden.ROOT, tmp_path, golden.ROOT))
    assert [differences(*pair) for pair in zip(before, again, strict=True)] == [[], []]
    numbers, message = (differences(*pair) for pair in zip(before, after, strict=True))
    assert messages and len(message) == 1 and "Do you mean" in message[0]
    assert "metrics · step · " in numbers[0] and any(
        "checkpoint · tensors · model/" in each for each in numbers
    )
    assert not any("step 1:" in each and "loss" in each for each in numbers), "forward is what it was"


NUDGE = """
import os

_forward = nn.Linear.forward


def _nudged(self, x):
    y = _forward(self, x)
    return y + (y - y.detach()) * 2.0**-23 if os.environ.get("PADDLE_TRAINER_ID") == "1" else y


nn.Linear.forward = _nudged
"""
