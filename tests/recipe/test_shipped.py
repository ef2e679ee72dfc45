"""The package's own recipes and models, from any folder, from a clone and from a wheel."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.recipe import read_recipe
from paddle_dp.recipe.shipped import at_hand, command, copy

ROOT = Path(__file__).resolve().parents[2]


def test_a_shipped_recipe_is_found_from_any_folder_and_one_s_own_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for word in ("digits_mlp", "digits_mlp.yaml", "configs/digits_mlp.yaml"):
        assert at_hand(Path(word)) == ROOT / "configs" / "digits_mlp.yaml"
        assert f"{word} is not in this folder: the shipped recipe" in capsys.readouterr().err
    for word in ("digits_mpl", "other/digits_mlp.yaml", "configs/digits_mlp.json"):
        assert at_hand(Path(word)) == Path(word)
    Path("configs").mkdir()
    Path("configs/digits_mlp.yaml").write_text("mine")
    assert at_hand(Path("configs/digits_mlp.yaml")) == Path("configs/digits_mlp.yaml")
    assert not capsys.readouterr().err


def test_a_copy_to_begin_from_has_the_model_and_all_that_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = copy("gpt_single", tmp_path / "mine")
    names = {str(file.relative_to(tmp_path / "mine")) for file in made}
    assert names >= {"configs/gpt_single.yaml", "models/gpt.py", "models/_chain.py", "models/_attention.py"}
    monkeypatch.chdir(tmp_path / "mine")
    assert read_recipe(Path("configs/gpt_single.yaml")).model.name == "gpt"
    with pytest.raises(UsageError, match=r"gpt_single.yaml, .*would be overwritten"):
        copy("gpt_single", tmp_path / "mine")


def test_a_copy_of_a_model_that_is_a_folder_has_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, net = tmp_path / "house", "from models._sizes import WIDTH\nfrom models.mlp import Config\n"
    recipe = (ROOT / "configs/digits_mlp.yaml").read_text().replace("use: mlp", "use: net")
    files = {
        "configs/net.yaml": recipe,
        "models/net/__init__.py": net,
        "models/net/layers.py": "",
        "models/_sizes.py": "WIDTH = 3\n",
    }
    for name, text in files.items():
        (house / name).parent.mkdir(parents=True, exist_ok=True)
        (house / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paddle_dp.recipe.shipped.shipped", lambda name: house / name)
    made = copy("net", tmp_path / "mine")
    assert {str(file.relative_to(tmp_path / "mine")) for file in made} == {*files}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt_single", ""),
        ("digits_mlp", " --ranks 2"),
        ("gpt_tensor2_data2", " --ranks 4"),
        ("gpt_tiny", " --ranks 4 strategy.tensor=2 strategy.pipeline=2"),
        ("gpt_6_7b", " --ranks 8"),  # a sentence goes on behind it
    ],
)
def test_a_copy_is_trained_on_the_ranks_of_its_header(name: str, words: str) -> None:
    assert command(ROOT / "configs" / f"{name}.yaml") == f"paddle-dp train configs/{name}.yaml{words}"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_strategy_takes_the_command_that_is_shown(path: Path) -> None:
    words = shlex.split(command(path))[3:]
    ranks = int(words[words.index("--ranks") + 1]) if "--ranks" in words else 1
    if "--devices" in words:
        ranks = len(words[words.index("--devices") + 1].split(","))
    recipe = read_recipe(path, [word for word in words if "=" in word])
    recipe.strategy.refuse(recipe, ranks, "cpu")


def test_an_unknown_recipe_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no shipped recipe 'digits_mpl'. Did you mean 'digits_mlp'"):
        copy("digits_mpl", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_wheel_trains_evaluates_and_exports_in_an_empty_folder(tmp_path: Path) -> None:
    def run(*command: str, **env: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            command,
            cwd=tmp_path / "empty",
            env={**inherited, **env},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    clone, there = tmp_path / "clone", tmp_path / "there"
    (tmp_path / "empty").mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True, timeout=60)
    # In a build environment of its own, as pip makes it: it may fetch the setuptools that pyproject.toml asks for.
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    run(*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(clone))
    (wheel,) = tmp_path.glob("*.whl")
    run(*pip, "install", "--no-deps", "--target", str(there), str(wheel))
    command = (sys.executable, "-m", "paddle_dp")
    said = run(*command, "train", "configs/digits_mlp.yaml", "--ranks", "2", PYTHONPATH=str(there))
    assert "held-out: loss 0.5771  acc1 0.9861" in said
    (tmp_path / "empty" / "runs" / "digits_mlp").rename(tmp_path / "empty" / "moved")
    assert "0.9861" in run(*command, "evaluate", "moved", PYTHONPATH=str(there))
    run(*command, "export", "moved", PYTHONPATH=str(there))
