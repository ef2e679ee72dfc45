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
# What makes a recipe small enough for a test; recipes whose data are not here are read, and not run.
SMALL = {
    "digits_mlp": ["train.batch=50"],
    "digits_convnet": ["train.batch=50"],
    "resnet18_random": [
        "train.batch=5", "dataset.shape=[3,32,32]", "dataset.classes=4", "dataset.samples=20", "dataset.test_samples=3",
        "model.classes=4",
    ],
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
    assert re.search(r"Expect|Gave|Not run", header[0]), (
        f"{path.name}: the header gives no number, nor says why not"
    )


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_command_of_a_header_fits_its_recipe(path: Path) -> None:
    """The overrides that a header shows are ones that the recipe takes."""
    for line in re.findall(r"paddle-dp \w+ configs/\S+(.*)", path.read_text()):
        overrides = [word for word in line.split() if re.fullmatch(r"[a-z_.]+=\S+", word)]
        read_recipe(path, [word.replace("…", "data") for word in overrides])


@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_trains_two_steps_on_two_ranks(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paddle_dp", "train", f"configs/{name}.yaml", "--ranks", "2"]
    small = ["--out", str(tmp_path / "run"), "train.length=2 steps", *SMALL[name]]
    done = subprocess.run([*command, *small], cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(entry.get("step", 0) for entry in told) == 2
    assert list((tmp_path / "run" / "checkpoints").glob("step-00000002"))


def test_nothing_that_can_run_here_is_left_out() -> None:
    """A recipe over `digits` or invented data needs no file: it must be in SMALL."""
    here = {path.stem for path in RECIPES if re.search(r"use: (digits|random_\w+)\b", path.read_text())}
    assert here == set(SMALL)
