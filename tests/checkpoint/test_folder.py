from __future__ import annotations

import pytest

from paddle_dp.checkpoint import best, check, clean, find, newest, save, set_aside, set_best
from paddle_dp.checkpoint.folder import find_at, publish
from paddle_dp.errors import CheckpointError, UsageError
from paddle_dp.mesh import Mesh


@pytest.fixture
def folder(tmp_path, snapshot_of):
    """A run's checkpoints of the steps 10, 20 and 30."""
    for step in (10, 20, 30):
        save(snapshot_of(step), tmp_path / "checkpoints", Mesh.alone())
    return tmp_path / "checkpoints"


def _damage(path):
    content = bytearray((path / "rank-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "rank-00000.safetensors").write_bytes(content)


def test_the_newest_is_the_last_one(folder, capsys):
    assert newest(folder) == folder / "step-00000030" and not capsys.readouterr().err
    assert newest(folder.parent / "absent") is None


def test_damaged_ones_are_skipped_and_named(folder, capsys):
    _damage(folder / "step-00000030")
    (folder / "step-00000020" / "manifest.json").unlink()
    assert newest(folder) == folder / "step-00000010"
    said = capsys.readouterr().err.splitlines()
    assert "step-00000030" in said[0] and "checksum" in said[0]
    assert "step-00000020" in said[1] and "manifest.json" in said[1]


def test_damaged_ones_are_not_said_to_be_absent(folder):
    for checkpoint in folder.glob("step-*"):
        (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"None of the checkpoints in .* can be used, .*step-00000030"):
        find("newest", folder)


def test_none_when_all_are_damaged(folder, capsys):
    for path in folder.iterdir():
        _damage(path)
    assert newest(folder) is None
    assert capsys.readouterr().err.count("Skipped") == 3


def test_all_ranks_get_the_first_ranks_answer(folder, on_ranks):
    assert on_ranks(3, lambda mesh: newest(folder, mesh)) == [folder / "step-00000030"] * 3
    assert on_ranks(2, lambda mesh: newest(folder / "absent", mesh)) == [None] * 2


def test_a_copy_without_its_name_and_foreign_folders_are_ignored(folder):
    (folder / "step-00000040").symlink_to(folder / "nowhere")
    for name in ("step-00000050.bak", "step-9999", "notes"):
        (folder / name).mkdir()
    (folder / "README").write_text("mine")
    assert newest(folder) == folder / "step-00000030"
    assert clean(folder) == []
    assert (folder / "README").exists() and (folder / "step-00000050.bak").exists()


@pytest.mark.parametrize(
    ("spec", "name"), [("newest", "step-00000030"), ("best", "step-00000010"), ("20", "step-00000020")]
)
def test_find_by_word_or_step(folder, spec, name):
    set_best(folder, folder / "step-00000010", {})
    assert find(spec, folder) == folder / name


def test_find_by_path(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    assert find(folder / "step-00000020", elsewhere) == folder / "step-00000020"
    assert find(str(folder), elsewhere) == find(folder.parent, elsewhere) == folder / "step-00000030"


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("25", "There is no checkpoint of step 25 in "),
        (
            "best",
            r"No best checkpoint was kept in .*: the training must have callbacks\.checkpoint\.best .* and evaluate",
        ),
    ],
)
def test_what_is_not_there_is_said_with_what_is(folder, spec, said):
    with pytest.raises(CheckpointError, match=rf"{said}.*Saved: step 10, 20, 30\. Give newest, a step"):
        find(spec, folder)
    with pytest.raises(UsageError):  # status 2: nobody is told how to go on
        find(spec, folder)


def test_a_best_one_that_is_gone_is_said_to_be_gone(folder):
    set_best(folder, folder / "step-00000020", {})
    (folder / "step-00000020").rename(folder.parent / "elsewhere")
    with pytest.raises(
        CheckpointError, match=r"which best\.json names, is not there any more\. .* step 10, 30"
    ):
        find("best", folder)


def test_a_path_that_is_no_checkpoint_is_said(folder, tmp_path):
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a folder"):
        find(tmp_path / "typo", folder)
    with pytest.raises(CheckpointError, match=r"There is no checkpoint in .*typo\."):
        find("newest", tmp_path / "typo")


def test_what_a_killed_job_left_is_removed(folder):
    for name in (
        ".step-00000040.partial-12-ab",
        ".step-00000010.deleted-12-ab",
        ".step-00000030.replaced-12-ab",
    ):
        (folder / name).mkdir()
    assert len(clean(folder)) == 3
    assert sorted(p.name for p in folder.iterdir()) == [f"step-000000{n}" for n in (10, 20, 30)]
    assert clean(folder / "absent") == []


def test_a_kill_between_the_two_renames_loses_nothing(folder):
    """`publish` moves the earlier checkpoint of a step aside before the new one gets its name."""
    (folder / "step-00000030").rename(folder / ".step-00000030.replaced-12-ab")
    assert clean(folder) == []
    check(folder / "step-00000030")


def test_a_replacement_that_is_refused_puts_the_earlier_one_back(folder):
    with pytest.raises(FileNotFoundError):
        publish(folder / "gone", folder / "step-00000030")
    check(folder / "step-00000030")
    assert len(list(folder.iterdir())) == 3


def test_later_checkpoints_are_set_aside_and_nothing_is_lost(folder, snapshot_of):
    set_best(folder, folder / "step-00000020", {"acc1": 0.5})
    save(snapshot_of(40), folder.parent / "disk", Mesh.alone())
    (folder / "step-00000040").symlink_to("../disk/step-00000040", target_is_directory=True)
    later, aside = set_aside(folder, 10)
    assert [path.name for path in later] == ["step-00000020", "step-00000030", "step-00000040"]
    assert newest(folder) == folder / "step-00000010" and best(folder) is None and clean(folder) == []
    assert (
        newest(aside) == find_at(aside) == aside / "step-00000040" and best(aside) == aside / "step-00000020"
    )
    assert set_aside(folder, 10) is None
    again = set_aside(folder, 9)
    assert again is not None and again[1] != aside


def test_an_earlier_best_stays(folder):
    set_best(folder, folder / "step-00000010", {"acc1": 0.5})
    set_aside(folder, 20)
    assert best(folder) == folder / "step-00000010" and newest(folder) == folder / "step-00000020"
    assert set_aside(folder / "absent", 3) is None
