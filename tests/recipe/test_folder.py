"""The folder of a run: claimed, moved aside, or gone on in."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.recipe.folder import claim


def test_an_older_run_is_moved_aside_and_stays_at_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert claim(folder, None) is None and folder.is_dir()
    (folder / "metrics.jsonl").touch()
    assert claim(folder, "newest") is None and (folder / "metrics.jsonl").exists()
    assert claim(folder, None) == tmp_path / "run.1" and not any(folder.iterdir())


@pytest.mark.parametrize("which", ["newest", "best", "120"])
def test_what_is_looked_for_in_the_folder_needs_a_run_there(tmp_path: Path, which: str) -> None:
    with pytest.raises(
        UsageError, match=r"run holds no run to resume\. Leave --resume out .*: --output-dir DIR\."
    ):
        claim(tmp_path / "run", which)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_run_goes_on_in_a_new_folder(tmp_path: Path) -> None:
    assert claim(tmp_path / "run", "elsewhere/checkpoints/step-00000120") is None
    assert (tmp_path / "run").is_dir()
