from __future__ import annotations

import json
import shutil

import pytest

from paddle_dp.checkpoint import best, best_numbers, checkpoints, prune, save, set_best
from paddle_dp.checkpoint import folder as folders
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import Mesh


@pytest.fixture
def folder(tmp_path, snapshot_of):
    for step in range(1, 6):
        save(snapshot_of(step), tmp_path, Mesh.alone())
    return tmp_path


def _steps(folder):
    return [int(path.name[5:]) for path in checkpoints(folder)]


def test_the_newest_few_stay(folder):
    gone = prune(folder, keep=2)
    assert _steps(folder) == [4, 5]
    assert [p.name for p in gone] == ["step-00000001", "step-00000002", "step-00000003"]
    assert prune(folder, keep=2) == []


def _damaged(folder, monkeypatch):
    """Keeping the newest one alone would leave nothing to resume from."""
    for step in (4, 5):
        (folder / f"step-0000000{step}" / "state.json").write_text("{}")


def _unread(folder, monkeypatch):
    monkeypatch.setattr(folders, "read_manifest", lambda path: pytest.fail("it was read"))


def _killed(folder, monkeypatch):
    """While files are removed."""
    monkeypatch.setattr(shutil, "rmtree", lambda path, **k: (path / "manifest.json").unlink())


def _with_a_best(folder, monkeypatch):
    set_best(folder, folder / "step-00000002", {"acc1": 0.9})


@pytest.mark.parametrize(
    ("change", "keep", "trusted", "left"),
    [
        (_with_a_best, 1, None, [2, 5]),
        (_damaged, 1, None, [3, 5]),
        (_unread, 1, 5, [5]),
        (_killed, 4, None, [2, 3, 4, 5]),
    ],
)
def test_those_that_stay(folder, monkeypatch, change, keep, trusted, left):
    change(folder, monkeypatch)
    prune(folder, keep=keep, **({"trusted": folder / f"step-0000000{trusted}"} if trusted else {}))
    assert _steps(folder) == left


def test_nothing_foreign_is_deleted(folder):
    (folder / "step-1").mkdir()
    (folder / "notes.txt").write_text("mine")
    prune(folder, keep=1)
    assert (folder / "step-1").exists() and (folder / "notes.txt").exists()


def test_keep_none_is_refused(folder):
    with pytest.raises(ValueError, match="1 or more"):
        prune(folder, keep=0)


def test_the_best_is_remembered_with_its_numbers(folder):
    assert best(folder) is None and best_numbers(folder) == {}
    for step in (2, 4):
        set_best(folder, folder / f"step-0000000{step}", {"loss": float("nan"), "acc1": step})
    assert best(folder) == folder / "step-00000004" and best_numbers(folder)["acc1"] == 4
    shutil.rmtree(folder / "step-00000004")
    assert best(folder) is None


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[]", '{"checkpoint": 3}', '{"checkpoint": "../../x", "numbers": {}}', "[" * 100_000],
)
def test_a_pointer_that_makes_no_sense_points_at_nothing(folder, content):
    (folder / "best.json").write_text(content)
    assert best(folder) is None and best_numbers(folder) == {}
    prune(folder, keep=1)
    assert _steps(folder) == [5]


def test_the_pointer_holds_no_path(folder):
    set_best(folder, folder / "step-00000002", {})
    assert json.loads((folder / "best.json").read_text())["checkpoint"] == "step-00000002"


def test_what_cannot_be_written_or_removed_is_a_sentence(folder, monkeypatch):
    def refused(self, *args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.rename", refused)
    monkeypatch.setattr("pathlib.Path.replace", refused)
    with pytest.raises(CheckpointError, match=r"step-00000001 was not removed: Permission denied"):
        prune(folder, keep=2)
    with pytest.raises(CheckpointError, match=r"best\.json was not written: Permission denied"):
        set_best(folder, folder / "step-00000002", {})
    assert _steps(folder) == [1, 2, 3, 4, 5] and best(folder) is None


def test_a_linked_checkpoint_is_left_alone(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "step-00000001"
    shutil.move(folder / "step-00000001", elsewhere)
    (folder / "step-00000001").symlink_to(elsewhere)
    prune(folder, keep=1)
    assert _steps(folder) == [1, 5] and (elsewhere / "manifest.json").exists()
