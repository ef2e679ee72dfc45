"""A recipe in a folder of its own, with a model that needs no paddle."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

MODEL = """
from dataclasses import dataclass

@dataclass(frozen=True, kw_only=True)
class Config:
    width: int = 64
    depth: int = 2

    def build(self):
        return self
"""
PLAIN = """\
model: {use: recipe_model.Config, width: 8}
dataset: {use: digits}
optimizer: {use: sgd}
schedule: {use: cosine, learning_rate: 3e-4}
train: {length: 3 epochs, batch: 32}
callbacks:
  - {use: metrics}
  - {use: evaluate, every: 2 epochs}
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes a recipe, the plain one if none is given, and returns its path."""
    (tmp_path / "recipe_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)

    def written(text: str = PLAIN, name: str = "tiny.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    yield written
    sys.modules.pop("recipe_model", None)
