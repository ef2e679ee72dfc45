"""The shelves as folders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.part.shelf import folders, load, names, shipped, summary
from tests.house.programs import ROOT


@pytest.fixture(autouse=True)
def _other_models() -> Iterator[None]:
    """Gives `models` back to the tests that come after."""
    before = {n: m for n, m in sys.modules.items() if n == "models" or n.startswith("models.")}
    yield
    for name in [n for n in sys.modules if n == "models" or n.startswith("models.")]:
        del sys.modules[name]
    sys.modules.update(before)


SHIPPED = sorted(file.stem for file in (ROOT / "models").glob("[!_]*"))


def house(root: Path, **files: str) -> Path:
    (root / "models").mkdir(parents=True)
    for name, text in files.items():
        (root / "models" / f"{name}.py").write_text(text)
    return root


def test_a_file_is_a_part_unless_it_begins_with_an_underscore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(house(tmp_path, net='"""A net.\n\nMore."""', _base="raise SystemExit", __init__=""))
    assert set(names("models")) - set(SHIPPED) == {"net"} and summary("models", "net") == "A net."


def test_the_packages_own_shelves_are_listed_without_being_imported() -> None:
    assert "adamw" in names("optimizers") and "_base" not in names("optimizers")


def test_an_unknown_shelf_is_told_with_the_near_miss() -> None:
    with pytest.raises(UsageError, match=r"no shelf 'modls'. Did you mean 'models'"):
        names("modls")


def test_models_are_found_above_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = house(tmp_path / "house", net="")
    monkeypatch.chdir(tmp_path)
    assert "net" not in names("models") and folders("models") == [shipped("models")]
    home = root / "configs" / "a.yaml"
    assert folders("models", home) == [root / "models", shipped("models")] and "net" in names("models", home)


def test_the_shipped_models_are_everywhere_behind_one_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(house(tmp_path, mlp='"""Mine."""\nWHO = "mine"'))
    assert load("models", "mlp").WHO == "mine" and summary("models", "mlp") == "Mine."
    assert load("models", "gpt").GPT.__name__ == "GPT" and summary("models", "gpt").startswith("GPT")
    assert names("models") == SHIPPED


def test_a_model_may_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = house(tmp_path) / "models" / "net"
    net.mkdir()
    (net / "__init__.py").write_text('"""A net."""\nfrom models.net.layers import WIDTH\n')
    (net / "layers.py").write_text("WIDTH = 3\n")
    monkeypatch.chdir(tmp_path)
    assert "net" in names("models") and summary("models", "net") == "A net."
    assert load("models", "net").WIDTH == 3


def test_a_folder_of_weights_is_no_shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights.bin").touch()
    monkeypatch.chdir(tmp_path)
    assert folders("models") == [shipped("models")]


@pytest.mark.parametrize("sign", [{}, {"__init__": "SIGN = 1"}])
def test_each_house_has_its_own_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: dict[str, str]
) -> None:
    for number in ("1", "2", "1"):
        root = tmp_path / number
        if not root.exists():
            house(root, net=f"from models.base import WHO\nHERE = {number}", base=f"WHO = {number}", **sign)
        monkeypatch.chdir(root)
        module = load("models", "net")
        assert (int(number), int(number)) == (module.HERE, module.WHO)
        assert load("models", "net") is module
