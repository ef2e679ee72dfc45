"""The resolved recipe can be read again, and is the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.recipe import read_recipe, resolved, write_recipe
from paddle_dp.recipe.write import recipe_text

Write = Callable[..., Path]
UNUSUAL = [
    "schedule.learning_rate=1e-05",
    "schedule.warmup=0.3333333333 epochs",
    "strategy.comm_buffer_size=1234567 B",
    "strategy.check_every=null",
    "train.precision={dtype: float16, scale: 1024}",
    "loss.use=cross_entropy",
    "output_dir='12'",
    "name='1e3'",
]


@pytest.mark.parametrize(
    "overrides", [[], UNUSUAL, ["callbacks=[]", "model.use=tests.recipe.test_schema.nothing"]]
)
def test_what_is_written_reads_back_as_the_same_recipe(
    write: Write, tmp_path: Path, overrides: list[str]
) -> None:
    recipe = read_recipe(write(), overrides)
    write_recipe(recipe, tmp_path / "recipe.yaml")
    assert read_recipe(tmp_path / "recipe.yaml") == recipe
    assert recipe_text(read_recipe(tmp_path / "recipe.yaml")) == recipe_text(recipe)


def test_defaults_are_written_out_and_the_command_stands_on_top(write: Write, tmp_path: Path) -> None:
    write_recipe(read_recipe(write()), tmp_path / "recipe.yaml")
    text = (tmp_path / "recipe.yaml").read_text()
    assert f"paddle-dp train {tmp_path}/recipe.yaml" in text.splitlines()[0]
    assert "name: tiny" in text and "comm_buffer_size: 25 MB" in text and "precision: float32" in text
    assert text.index("model:") < text.index("train:") < text.index("callbacks:")


def test_a_write_that_fails_leaves_the_old_recipe(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "run" / "recipe.yaml"
    target.parent.mkdir()
    target.write_text("old")
    monkeypatch.setattr(
        Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space left"):
        write_recipe(read_recipe(write()), target)
    assert os.listdir(target.parent) == ["recipe.yaml"] and target.read_text() == "old"


def test_the_recipe_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").touch()
    assert resolved(tmp_path) == tmp_path / "recipe.yaml"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"holds no recipe.yaml"):
        resolved(tmp_path / "empty")
    (tmp_path / "script" / "checkpoints").mkdir(parents=True)
    said = r"is a script's run .* Write one to .*script/recipe\.yaml, .*`paddle-dp merge .*script -o FILE` needs none"
    with pytest.raises(UsageError, match=said):
        resolved(tmp_path / "script")
    with pytest.raises(
        UsageError, match=r"nowhere is no folder: name the folder of a run, such as runs/NAME\.$"
    ):
        resolved(tmp_path / "nowhere")
    for name in ("digits_mlp", "digits_mlp.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").touch()
    with pytest.raises(
        UsageError, match=r"Did you mean 'digits_mlp'\? Runs next to it: digits_mlp, digits_mlp\.1\.$"
    ):
        resolved(tmp_path / "digit_mlp")
