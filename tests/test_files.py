"""Files appear whole or not at all, also after a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.files import remove_partials, replacing


def test_a_block_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")

    def fail() -> None:
        with replacing(tmp_path / "a.json") as partial:
            partial.write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_half_written_files_of_killed_processes_are_removed_and_no_other(tmp_path: Path) -> None:
    with replacing(tmp_path / "certificate.json") as partial:
        partial.write_text("{")
        left = partial.name  # the name that a kill leaves
    kept = [".gitignore", ".my.partial-notes", "a.partial-1-0123abcd", "certificate.json"]
    for name in (left, *kept[:3]):
        (tmp_path / name).write_text("x")
    remove_partials(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
