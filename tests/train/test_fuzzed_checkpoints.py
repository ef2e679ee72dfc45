"""A training that resumes a checkpoint whose state or whose own part of a rank was changed: an error with a name."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.checkpoint import UnusableError
from paddle_dp.checkpoint.manifest import MANIFEST
from paddle_dp.errors import PaddleDPError
from tests.checkpoint import fuzz
from tests.house.datasets import Samples


def trainer(folder: Path, resume: bool | str = False) -> Trainer:
    paddle.seed(0)
    return Trainer.of(
        model=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1D(4), nn.Linear(4, 2)),
        loss={"use": "cross_entropy"},
        optimizer="adamw",
        schedule={"use": "cosine", "learning_rate": 1e-3},
        train=Samples(16, lambda i: (np.full(4, i, "float32"), np.int64(i % 2))),
        batch=4,
        callbacks=["checkpoint"],
        folder=folder,
        length="6 steps",
        resume=resume,
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    trainer(folder).fit("3 steps")
    return folder / "checkpoints/step-00000003"


def changed(original: Path, place: Path, change: Any) -> Path:
    folder = place / original.name
    shutil.copytree(original, folder)
    change(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    fuzz.refit(folder, manifest)
    fuzz.write_manifest(folder, manifest)
    return folder


def numbered(number: int) -> Any:
    draw = random.Random(number)
    name = "rank-00000.json" if draw.random() < 0.4 else "state.json"
    return lambda folder: fuzz._json_file(name)(folder, draw, {})


@pytest.mark.parametrize("first", [0, pytest.param(1000, marks=pytest.mark.long)])
def test_a_changed_state_is_an_error_with_a_name(original: Path, tmp_path: Path, first: int) -> None:
    refused = 0
    for number in range(first, first + (500 if first else 20)):
        place = tmp_path / str(number)
        folder = changed(original, place, numbered(number))
        began = time.perf_counter()
        try:
            trainer(tmp_path / "new", str(folder))
        except PaddleDPError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"mutation {number}: {type(error).__name__}: {error}") from error
        assert time.perf_counter() - began < 5, number
        shutil.rmtree(place)
    assert refused > (300 if first else 5)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({}, "'format' is missing"),
        ({"format": 1}, "'progress' is missing"),
        ({"format": 1, "progress": {"step": -3}}, "progress.step is '-3'"),
        ({"format": 1, "progress": {"step": True}}, "progress.step is 'True'"),
        ({"progress": {"step": 3}, "identity": 7}, "identity is no group of values"),
    ],
)
def test_what_makes_no_sense_is_named(
    original: Path, tmp_path: Path, state: dict[str, Any], why: str
) -> None:
    folder = changed(original, tmp_path, lambda folder: (folder / "state.json").write_text(json.dumps(state)))
    with pytest.raises(UnusableError, match=f"its content makes no sense.*{why}"):
        trainer(tmp_path / "new", str(folder))
