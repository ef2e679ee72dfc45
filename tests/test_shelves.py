"""Every file on a shelf keeps the shelf's contract: a promise, one frozen Config, the right `build`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from paddle_dp.checks.model_mixing import MODELS
from paddle_dp.part import Annotation, settings_of
from paddle_dp.recipe import Precision, Recipe
from paddle_dp.recipe.schema import LoaderSettings
from paddle_dp.recipe.train_schema import Train
from paddle_dp.strategies._base import StrategyConfig

ROOT = Path(__file__).resolve().parent.parent
BUILD: dict[str, str] = {  # what a part's build() is called with, after self
    "models": "()",
    "datasets": "(split)",
    "losses": "()",
    "optimizers": "(learning_rate, named_parameters)",
    "schedules": "(*, steps, steps_per_epoch, batch)",
    "strategies": "(mesh)",
    "metrics": "()",
    "callbacks": "(run)",
    "adapters": "(model, seed)",
}


def folder(shelf: str) -> Path:
    return ROOT / ("models" if shelf == "models" else f"paddle_dp/{shelf}")


def shelf_files() -> list[tuple[str, str]]:
    """(shelf, name) of every part; files whose name starts with `_` are shared by their neighbours and are no parts."""
    return [
        (shelf, file.stem)
        for shelf in BUILD
        for file in sorted(
            [*folder(shelf).glob("*.py"), *(f.parent for f in folder(shelf).glob("*/__init__.py"))]
        )
        if not file.name.startswith("_")
    ]


@pytest.mark.parametrize("kind", [Recipe, Train, LoaderSettings, Precision, Annotation])
def test_every_key_of_a_recipe_says_what_it_means(kind: type) -> None:
    assert not [setting.name for setting in settings_of(kind) if not setting.meaning]


def read(shelf: str, name: str) -> ModuleType:
    return importlib.import_module(f"models.{name}" if shelf == "models" else f"paddle_dp.{shelf}.{name}")


def faults(module: ModuleType, shelf: str) -> list[str]:
    """What keeps this file from being a part of this shelf; empty when nothing does."""
    found = []
    first = (module.__doc__ or "").strip().split("\n")[0]
    if not first or len(first) > 120:
        found.append(
            "the docstring's first line is its help in `paddle-dp parts`: one line, 120 characters at most"
        )
    config = getattr(module, "Config", None)
    if config is None or config.__module__ != module.__name__ or not dataclasses.is_dataclass(config):
        return [*found, "it has no `@dataclass(frozen=True, kw_only=True) class Config` of its own"]
    if not config.__dataclass_params__.frozen:
        found.append("Config is not frozen")
    fields = [field for field in dataclasses.fields(config) if field.init]
    found += [f"Config.{field.name} is not keyword-only" for field in fields if not field.kw_only]
    found += [
        f"Config.{setting.name} says nothing of itself: a sentence behind the field is its help"
        for setting in settings_of(config)
        if not setting.meaning
    ]
    found += [
        f"Config.{field.name} is no YAML key: lower case, no leading _, not `use`"
        for field in fields
        if field.name.startswith("_") or field.name != field.name.lower() or field.name == "use"
    ]
    if shelf == "strategies" and not issubclass(config, StrategyConfig):
        found.append("Config does not derive from strategies/_base.py's StrategyConfig")
    build = getattr(config, "build", None)
    if build is None:
        return [*found, f"Config has no build{BUILD[shelf]}"]
    signature = inspect.signature(build)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in list(signature.parameters.values())[1:]]
    said = str(inspect.Signature(bare))
    if said != BUILD[shelf]:
        found.append(f"build is called as build{BUILD[shelf]}, and takes {said}")
    if signature.return_annotation is inspect.Signature.empty:
        found.append("build does not say what it returns")
    return found


@pytest.mark.parametrize(("shelf", "name"), shelf_files())
def test_a_part_keeps_its_contract(shelf: str, name: str) -> None:
    found = faults(read(shelf, name), shelf)
    assert not found, f"{folder(shelf).relative_to(ROOT)}/{name}.py: {'; '.join(found)}"


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("", "no `@dataclass"),
        ("@dataclass(kw_only=True)\nclass Config:\n  def build(self) -> int: ...", "not frozen"),
        (
            "@dataclass(frozen=True)\nclass Config:\n  a: int = 1\n  def build(self) -> int: ...",
            "not keyword-only",
        ),
        ("@dataclass(frozen=True, kw_only=True)\nclass Config:\n  a: int = 1", "no build()"),
        (
            "@dataclass(frozen=True, kw_only=True)\nclass Config:\n  def build(self, x) -> int: ...",
            "takes (x)",
        ),
        ("@dataclass(frozen=True, kw_only=True)\nclass Config:\n  def build(self): ...", "what it returns"),
        (
            "@dataclass(frozen=True, kw_only=True)\nclass Config:\n  use: int\n  def build(self) -> int: ...",
            "YAML key",
        ),
        (
            "@dataclass(frozen=True, kw_only=True)\nclass Config:\n  a: int\n  def build(self) -> int: ...",
            "Config.a says nothing of itself",
        ),
        ("@dataclass(frozen=True, kw_only=True)\nclass Config:\n  def build(self) -> int: ...", None),
    ],
)
def test_a_fault_is_seen(code: str, complaint: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("a_part", "A promise.")
    monkeypatch.setitem(sys.modules, "a_part", module)
    exec("from dataclasses import dataclass\n" + code, module.__dict__)
    found = "; ".join(faults(module, "models"))
    assert (complaint in found) if complaint else not found


def test_the_models_of_the_package_are_known_by_their_files() -> None:
    files = {file.stem for file in (ROOT / "models").glob("*.py")} - {"__init__"}
    assert files == MODELS, "paddle_dp/checks/model_mixing.py: MODELS has other names than the folder models/"
