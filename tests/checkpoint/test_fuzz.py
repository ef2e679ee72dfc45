"""Whatever is changed in a checkpoint, with checksums that fit: an error with a name, soon, and in little memory.

The mutations are numbered (tests/checkpoint/fuzz.py); the default ones are always the same 50.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from paddle_dp.checkpoint import UnusableError, load
from paddle_dp.checkpoint.manifest import MANIFEST
from tests.checkpoint import fuzz
from tests.house.programs import run_python

MEMORY, SECONDS = 500e6, 5.0


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuzz.make(tmp_path_factory.mktemp("fuzz"))


def test_the_checkpoint_that_is_changed_is_good(original: Path) -> None:
    fuzz.use(original)


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_a_changed_checkpoint_is_an_error_with_a_name(original: Path, first: int) -> None:
    found = [fuzz.one(number, original) for number in range(first, first + 10)]
    assert sum(text is not None for text in found) >= 5
    for text in filter(None, found):
        assert original.name in text or "safetensors" in text


def test_a_manifest_of_very_many_ranks_is_refused_at_once(original: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(original, tmp_path / original.name)
    manifest = json.loads((folder / MANIFEST).read_text())
    fuzz.write_manifest(folder, manifest | {"ranks": 10**9})
    with pytest.raises(UnusableError, match="does not list rank-00001"):
        load(folder)


@pytest.mark.parametrize("name", [MANIFEST, "state.json", "rank-00000.safetensors"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(original: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(original, tmp_path / original.name)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UnusableError, match=f"{name} cannot be read: it is no regular file"):
        load(folder)


@pytest.mark.long
def test_a_thousand_changed_checkpoints() -> None:
    found = json.loads(run_python("-m", "tests.checkpoint.fuzz", "1000", "1000", timeout=500).stdout)
    print(found)
    assert found["raw"] == []
    assert found["refused"] > 700
    assert found["slowest"][0] < SECONDS
    assert found["peak"] < MEMORY
