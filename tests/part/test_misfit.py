"""What cannot be a part of its shelf is refused before it is called."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle.nn import functional

import paddle_dp
from paddle_dp.errors import RecipeError
from paddle_dp.part import SHELVES, Annotation, annotate, read_part
from paddle_dp.part.call import validate_callable

SHELL = """
from os import system
import functools, subprocess
from subprocess import Popen
shout = functools.partial(system, "touch called")

class Worker(Popen):
    pass

class Table(dict):
    "Its parameters are those of a class in C, which Python does not know."

class Plain:
    def __init__(self, *given, **named):
        open("called", "w").close()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "with_a_shell.py").write_text(SHELL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("with_a_shell", None)
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize("shelf", SHELVES)
@pytest.mark.parametrize(
    "use",
    ["os.system", "subprocess.Popen", "builtins.print", "with_a_shell.system", "with_a_shell.Popen",
     "with_a_shell.shout", "with_a_shell.subprocess.run"],
)  # fmt: skip
def test_nothing_of_the_standard_library_is_a_part(shelf: str, use: str) -> None:
    with pytest.raises(
        RecipeError, match="is of Python's standard library, which holds no part of a training"
    ) as e:
        read_part(shelf, {"use": use, "args": ["touch", "called"], "cuts": {"x": "colwise"}})
    assert e.value.mistakes[0].path == ("use",)


@pytest.mark.parametrize("shelf", sorted({*SHELVES} - {"losses"}))
def test_a_class_of_another_kind_is_refused(shelf: str) -> None:
    with pytest.raises(
        RecipeError, match=r"with_a_shell.Plain is a class (that is not derived from|without the method)"
    ):
        read_part(shelf, {"use": "with_a_shell.Plain"})


@pytest.mark.parametrize(
    ("shelf", "called"),
    [
        ("models", paddle.nn.Linear),
        ("models", paddle.vision.models.resnet18),
        ("models", functools.partial(paddle.nn.Linear, 2)),
        ("optimizers", paddle.optimizer.Lamb),
        ("schedules", paddle.optimizer.lr.StepDecay),
        ("losses", paddle.nn.CrossEntropyLoss),
        ("losses", paddle.nn.CrossEntropyLoss()),
        ("losses", functional.cross_entropy),
        ("losses", functools.partial(functional.cross_entropy, label_smoothing=0.1)),
        ("losses", paddle.nn.Linear(1, 1).forward),
        ("callbacks", paddle_dp.Callback),
        ("datasets", paddle.vision.datasets.MNIST),
        ("blocks", paddle.flatten),
        ("blocks", functional.relu),
        ("blocks", functional.gelu),
        ("blocks", paddle.nn.Flatten),
    ],
)
def test_what_is_a_part_is_none(shelf: str, called: Any) -> None:
    assert validate_callable(called, shelf) is None


@pytest.mark.parametrize(
    ("shelf", "called"),
    [
        ("models", paddle.load),
        ("losses", paddle.load),
        ("datasets", paddle.load),
        ("blocks", paddle.load),
        ("models", paddle.utils.run_check),
        ("models", paddle.optimizer.Adam),
        ("optimizers", paddle.nn.Linear),
        ("schedules", paddle.optimizer.Adam),
        ("callbacks", paddle.callbacks.EarlyStopping),
        ("strategies", paddle.DataParallel),
        ("models", subprocess.Popen),
        ("losses", [].append),
        ("losses", os.environ.get),
    ],
)
def test_what_is_none_is_told(shelf: str, called: Any) -> None:
    assert validate_callable(called, shelf)


@pytest.mark.parametrize("name", ["place", "Places"])
def test_a_strategy_that_is_not_derived_from_the_public_base_is_refused_before_the_launcher_asks_it(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / "mine_places.py").write_text(
        "from dataclasses import dataclass\nfrom paddle_dp.strategies import StrategyConfig\n"
        "def place(mesh): return mesh\n"
        "@dataclass\nclass Places:\n    def build(self, mesh): return mesh\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Derived(StrategyConfig):\n"
        "    def build(self, mesh): return mesh\n"
    )
    with pytest.raises(RecipeError, match=r"derived from paddle_dp\.strategies\.StrategyConfig"):
        read_part("strategies", {"use": f"mine_places.{name}"})
    derived = read_part("strategies", {"use": "mine_places.Derived", "recompute": "full"})
    assert derived.config.layout(2).degrees.data == 2
    sys.modules.pop("mine_places")


def test_a_function_whose_settings_nobody_knows_is_refused_by_name() -> None:
    for use, said in (
        ("numpy.array", "is a function in C"),
        ("with_a_shell.Table", "cannot be a part: no signature"),
    ):
        with pytest.raises(RecipeError, match=f"dataset {use} {said}"):
            read_part("datasets", {"use": use})


def test_a_chain_of_blocks_calls_no_function_of_the_standard_library() -> None:
    model = paddle.nn.Sequential(paddle.nn.Linear(2, 2))
    with pytest.raises(
        RecipeError, match=r"model.blocks.1: os.system cannot be used: it is of Python's standard"
    ):
        annotate(model, Annotation(blocks=("0", {"use": "os.system"})))
    with pytest.raises(
        RecipeError, match=r"with_a_shell.Plain cannot be used: it is a class that is not derived"
    ):
        annotate(model, Annotation(blocks=("0", {"use": "with_a_shell.Plain"})))
