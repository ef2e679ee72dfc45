"""The words of the command line: what they ask for, how they answer, and how quickly."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paddle_dp
from paddle_dp import cli
from paddle_dp.assembly.first_forward import tried
from paddle_dp.cli import training
from paddle_dp.errors import JobError
from paddle_dp.launch.check_process import CheckProcess
from paddle_dp.launch.command import Job
from paddle_dp.recipe import read_recipe
from tests.house.programs import run_python

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "configs/digits_mlp.yaml"
Leave = Callable[..., int]


def command(*words: str, interpreter: tuple[str, ...] = (), **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *interpreter, "-m", "paddle_dp", *words],
        env=environment, cwd=more.pop("cwd", ROOT), capture_output=True, text=True, timeout=60, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "nowhere.yaml"], "nowhere.yaml: there is no such file."),
        (["train", "configs"], "configs: is a folder, not a recipe."),
        (["train", "a.yaml", "--ranks", "0"], "--ranks 0: a job has 1 rank or more."),
        (["train", "a.yaml", "--devices", "gpu:0"], "--devices gpu:0: give GPU numbers separated by commas"),
        (["evaluate", "nowhere"], "nowhere is no folder: name the folder of a run"),
        (
            ["verify", str(DIGITS), "--ranks", "1"],
            "verify compares one process with 2 ranks or more",
        ),
        (["dashboard", "nowhere"], "nowhere is no folder"),
        (["parts", "modls"], "There is no shelf 'modls'. Did you mean 'models'?"),
        (["check", "nowhere.yaml"], "nowhere.yaml: there is no such file."),
        (["evaluate", "x" * 300], "xxx/recipe.yaml: File name too long. Give another path."),
        (["why", "x" * 300], "xxx: File name too long. Give another path."),
    ],
)
def test_a_mistake_is_one_message_and_status_2(
    leave: Leave,
    words: list[str],
    said: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "configs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert leave(*words) == 2
    out, err = capfd.readouterr()
    assert said in err and err.count("\n") == 1 and out == ""


def test_a_folder_of_another_user_is_one_message_and_status_2(
    leave: Leave, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_file", closed)
    assert leave("evaluate", "theirs") == 2
    assert capfd.readouterr() == ("", "theirs/recipe.yaml: Permission denied. Give another path.\n")


@pytest.mark.parametrize(
    "words",
    [
        "trian", "train", "generate r --tokens -5", "generate r --top-k 0", "train a.yaml --rank 2",
        "dashboard x --port y",
    ],
)  # fmt: skip
def test_a_wrong_word_is_status_2(leave: Leave, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(*words.split()) == 2
    assert "Error" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train a.yaml --nproc_per_node 2", "--ranks N"),
        ("train -c a.yaml", "the recipe's path alone"),
        ("infer r", "paddle-dp predict"),
        ("test r", "paddle-dp evaluate"),
    ],
)
def test_words_of_other_command_lines_are_answered(
    leave: Leave, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(*words.split()) == 2
    assert f"Here that is {said}." in capsys.readouterr().err


def test_an_error_on_purpose_is_its_message_alone(
    leave: Leave, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "start", lambda job: (_ for _ in ()).throw(JobError("rank 1 is gone")))
    assert leave("train", "a.yaml") == 1
    assert capsys.readouterr().err == "rank 1 is gone\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "start", lambda job: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        cli.main(["train", "a.yaml"])


@pytest.mark.parametrize("missing", ["paddle", "something_else"])
def test_a_missing_paddle_is_told_with_the_command(
    leave: Leave, missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(job: Job) -> None:
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(training, "start", run)
    if missing == "paddle":
        assert leave("train", "a.yaml") == 2 and "pip install -e '.[cpu]'" in capsys.readouterr().err
    else:
        with pytest.raises(ModuleNotFoundError):
            cli.main(["train", "a.yaml"])


def test_help_is_quick_and_without_paddle() -> None:
    """Its time is the modules that it imports, a millisecond each; seconds would measure the neighbours."""
    done = command("--help", interpreter=("-X", "importtime"))
    assert done.returncode == 0
    verbs = ("train", "evaluate", "verify", "dashboard", "parts", "check", "schema")
    assert all(word in done.stdout for word in (*verbs, "--version"))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported and not imported & {
        "paddle", "numpy", "yaml", "visualdl", "matplotlib", "psutil",
    }  # fmt: skip
    assert len(imported) < 450, "about 350 when this was written"


def test_importing_does_not_import_paddle() -> None:
    """Nor does what imports less: of two that do, the first is named."""
    modules = ("paddle_dp", *(f"paddle_dp.{m}" for m in ("recipe", "launch.dashboard", "cli")))
    code = "; ".join(f"import sys, {m}; assert 'paddle' not in sys.modules, '{m}'" for m in modules)
    run_python("-c", code)


def test_the_version(leave: Leave, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("--version") == 0
    assert capsys.readouterr().out == f"paddle-dp {paddle_dp.__version__}\n"


def test_parts_and_check_and_schema(leave: Leave, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("model: {use: mlp}\n")
    assert leave("parts") == 0 and "cross_entropy" in capsys.readouterr().out
    assert leave("check", str(tmp_path / "a.yaml")) == 2
    assert "a recipe needs 'train'" in capsys.readouterr().err
    assert leave("schema") == 0
    schema = capsys.readouterr()
    assert schema.out.startswith('{\n  "$schema"') and not schema.err


@pytest.mark.processes
def test_what_paddle_warns_of_when_it_is_imported_is_not_shown() -> None:
    done = command("check", "--no-run", "tests/faults/tiny.yaml")
    assert done.returncode == 0 and "mlp on digits" in done.stdout and not done.stderr


def test_check_opens_the_data_unless_it_is_told_not_to(
    leave: Leave, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's data are the user's: with --no-run it is right, without there is a path to give."""
    monkeypatch.setattr(CheckProcess, "__call__", lambda self, *said: tried(read_recipe(*said)))
    words = ("check", str(ROOT / "configs/resnet50_imagenet.yaml"))
    assert leave(*words, "--no-run") == 0
    assert leave(*words) == 2 and "dataset.path is not given" in capsys.readouterr().err


def test_no_word_at_all_shows_the_help(leave: Leave, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave() == 2
    shown = capsys.readouterr()
    assert "Usage: paddle-dp" in shown.out + shown.err and "Traceback" not in shown.err
