"""The device is built once, whoever asks; where it cannot be, one sentence says why."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.sim import build


def absent(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_what_is_missing_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.why_not() is None
    for owner, name, value, said in (
        (shutil, "which", lambda _: None, "needs a C++ compiler, and there is no g++ here."),
        (platform, "machine", lambda: "aarch64", "is for Linux on x86-64, and this is linux on aarch64."),
        (
            importlib.metadata,
            "version",
            lambda _: "3.2.0",
            "is written for paddlepaddle 3.3.1, and 3.2.0 is installed.",
        ),
        (importlib.metadata, "version", absent, "which is not installed."),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert (build.why_not() or "").endswith(said)
            with pytest.raises(RuntimeError, match="the simulated accelerator"):
                build.built()


def test_two_at_once_build_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []

    def make(folder: Path) -> None:
        begun.append(folder)
        folder.mkdir()
        (folder / build.LIBRARY).touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_build", make)
    threads = [threading.Thread(target=build.built) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(begun) == 1 and begun[0].parent == tmp_path / "paddle_dp-sim"


def test_other_sources_are_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._digest()
    shutil.copytree(build.SOURCES, tmp_path / "device")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "device")
    assert build._digest() == before
    (tmp_path / "device" / "link.cc").write_text("// another")
    assert build._digest() != before


def test_what_the_compiler_says_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"(?i)no such file"):
        build._run("g++", "/there/is/no/such.cc")


@pytest.mark.long
@pytest.mark.processes
def test_without_a_compiler_its_tests_are_skipped_with_the_sentence() -> None:
    command = [
        sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "tests/sim/test_operations.py",
    ]  # fmt: skip
    without = {**os.environ, "CXX": "c++-of-nobody"}
    done = subprocess.run(command, cwd=build.SOURCES.parents[2], env=without, capture_output=True, text=True)
    assert done.returncode == 0 and "1 skipped" in done.stdout
    assert "needs a C++ compiler, and there is no c++-of-nobody here." in done.stdout


def test_a_build_says_how_long_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On standard error: standard output is the folder's name, for CUSTOM_DEVICE_ROOT."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_build", lambda folder: (folder.mkdir(), (folder / build.LIBRARY).touch()))
    build.main()
    build.main()
    said, told = capsys.readouterr()
    assert (
        len(set(said.splitlines())) == 1 and Path(said.splitlines()[0]).parent == tmp_path / "paddle_dp-sim"
    )
    assert [line.partition(" in ")[0] for line in told.splitlines()] == ["built the simulated accelerator"]
