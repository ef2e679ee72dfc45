"""The folder of a run: claimed, moved aside, or gone on in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.recipe.folder import LOCK, claim, holds, move_aside, release


def test_an_older_run_is_moved_aside_and_stays_at_a_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert claim(folder, None) is None and folder.stat().st_mode & 0o777 == 0o700
    (folder / "metrics.jsonl").touch()
    assert claim(folder, "newest") is None and (folder / "metrics.jsonl").exists()
    older, logs = claim(folder, None), folder / "logs/attempt-002"
    logs.mkdir(parents=True)
    assert holds(folder, older), "until all checks have passed"
    assert move_aside(folder, older, logs) == tmp_path / "run.1"
    assert sorted(path.name for path in folder.iterdir()) == [LOCK, "logs"] and logs.is_dir()
    assert sorted(path.name for path in (tmp_path / "run.1").iterdir()) == ["logs", "metrics.jsonl"]
    assert not holds(folder, older) and move_aside(folder, older) is None


def test_a_folder_in_which_a_job_runs_is_refused_and_not_moved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = f"from paddle_dp.recipe.folder import claim; from pathlib import Path; claim(Path({str(folder)!r}), None)"
    hold = f"{words}; Path({str(folder / 'metrics.jsonl')!r}).touch(); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None and job.stdout.readline() == b"held\n"
        for resume in ("newest", None):
            with pytest.raises(
                UsageError, match=rf"belongs to a job that is running \(process {job.pid} on "
            ):
                claim(folder, resume)
        assert (folder / "metrics.jsonl").exists() and not (tmp_path / "run.1").exists()
        job.kill()  # the kernel lets go
    assert claim(folder, "newest") is None
    assert claim(folder, "newest") is None  # one process may, again and again
    release(folder)
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE) as other:
        assert other.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("name", "needed"),
    [(".", "the working folder"), ("..", "the working folder"), ("own", "own/train.yaml")],
)
def test_a_run_with_what_the_job_needs_in_it_does_not_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, needed: str
) -> None:
    """`--out .` ended in a ValueError; the recipe's file moved away, and the next attempt did not find it."""
    (tmp_path / "work/own").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    folder, recipe = Path(name), Path("own/train.yaml")
    recipe.touch()
    assert claim(folder, None, recipe=recipe) is None, "no run yet: nothing would move"
    (folder / "recipe.yaml").touch()
    with pytest.raises(UsageError, match=rf"and {needed} with it\. .*: --resume; or .*--output-dir DIR"):
        claim(folder, None, recipe=recipe)
    assert claim(folder, "newest", recipe=recipe) is None


def test_a_run_with_its_script_in_it_does_not_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").touch()
    monkeypatch.setattr("sys.argv", [str(tmp_path / "script.py")])
    with pytest.raises(UsageError, match=r"script\.py with it"):
        claim(tmp_path, None)


def test_a_runs_recipe_starts_another_run_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (recipe := tmp_path / "run/recipe.yaml").touch()
    older = claim(tmp_path / "run", None, recipe=recipe)
    assert move_aside(tmp_path / "run", older) == tmp_path / "run.1"


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


@pytest.mark.parametrize(
    "name", [LOCK, "metrics.jsonl", "certificate.json", "recipe.yaml", "evaluation.json"]
)
@pytest.mark.parametrize(
    ("place", "what"),
    [
        (lambda path, victim: path.symlink_to(victim), "a link to"),
        (lambda path, victim: path.hardlink_to(victim), "a file with a second name elsewhere"),
        (lambda path, victim: os.mkfifo(path), "a pipe, a socket or a device"),
        (lambda path, victim: path.mkdir(), "a folder"),
    ],
    ids=["link", "hard link", "pipe", "folder"],
)
@pytest.mark.parametrize("resume", [None, "newest"])
def test_what_is_not_a_runs_own_file_is_refused_and_stays(
    tmp_path: Path, name: str, place: Callable[[Path, Path], object], what: str, resume: str | None
) -> None:
    """A lock, metrics and a certificate that were links overwrote any file of the user's."""
    folder, victim = tmp_path / "run", tmp_path / "victim"
    (folder / "checkpoints").mkdir(parents=True)
    victim.write_text("precious")
    place(folder / name, victim)
    with pytest.raises(UsageError, match=rf"run/{name} is {what}.* --output-dir DIR"):
        claim(folder, resume)
    assert victim.read_text() == "precious" and not (tmp_path / "run.1").exists()


def test_checkpoints_may_be_on_another_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "disk")
    assert claim(tmp_path / "run", "newest") is None
    if os.geteuid() == 0:
        os.chown(tmp_path / "run" / "checkpoints", 65534, 65534, follow_symlinks=False)
        with pytest.raises(UsageError, match="checkpoints is a link to"):
            claim(tmp_path / "run", "newest")
