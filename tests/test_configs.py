"""Every recipe in configs/ is right, says how it is run, and trains where its data are at hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_dp.recipe import read_recipe

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
# A recipe over invented data, or over those that scikit-learn carries, needs no file: it is trained here.
AT_HAND = [path for path in RECIPES if re.search(r"use: (digits|random_\w+)\b", path.read_text())]
SMALLER = {  # what makes two steps of a recipe take seconds, where a batch of 50 alone does not
    "resnet18_random": [
        "train.batch=5", "dataset.shape=[3,32,32]", "dataset.classes=4", "dataset.samples=20", "dataset.test_samples=3",
        "model.classes=4",
    ],
    "resnet50_pipeline": ["train.batch=4", "train.micro_batches=2", "model.depth=18", "dataset.shape=[3,8,8]"],
    "large_classifier": ["train.batch=50", "model.classes=1000", "dataset.classes=1000"],
}  # fmt: skip


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_reads(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe.name == path.stem
    assert recipe.folder == Path("runs") / path.stem


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_says_how_it_is_run(path: Path) -> None:
    header = re.match(r"(?:#.*\n)+", path.read_text())
    assert header, f"{path.name} begins with no comment"
    command = f"paddle-dp train configs/{path.name}"
    assert command in header[0], f"{path.name}: the header does not show `{command} …`"
    assert re.search(r"(?i)expect|gave|\bgives\b|not (been )?run|no run", header[0]), (
        f"{path.name}: the header gives no number, nor says why not"
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_command_of_a_header_fits_its_recipe(path: Path) -> None:
    """The overrides that a header shows are ones that the recipe takes."""
    for line in re.findall(r"paddle-dp \w+ configs/\S+(.*)", path.read_text()):
        overrides = [word for word in line.split() if re.fullmatch(r"[a-z_.]+=\S+", word)]
        read_recipe(path, [word.replace("…", "data") for word in overrides])


@pytest.mark.parametrize("path", AT_HAND, ids=lambda path: path.stem)
def test_a_recipe_trains_two_steps_on_the_ranks_of_its_header(path: Path, tmp_path: Path) -> None:
    shown = re.search(r"--ranks (\d+)", path.read_text())
    command = [
        sys.executable,
        "-m",
        "paddle_dp",
        "train",
        f"configs/{path.name}",
        "--ranks",
        shown[1] if shown else "2",
    ]
    small = [
        "--out",
        str(tmp_path / "run"),
        "train.length=2 steps",
        *SMALLER.get(path.stem, ["train.batch=50"]),
    ]
    done = subprocess.run([*command, *small], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(entry.get("step", 0) for entry in told) == 2


def test_recipes_that_can_run_here_are_run() -> None:
    assert {"digits_mlp", "digits_convnet", "resnet18_random"} <= {path.stem for path in AT_HAND}
