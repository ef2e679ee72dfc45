"""The tools' tables as markdown and CSV, and their command lines."""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.command_line import ROOT, environment, paddle_dp, parser_of, why_no_import
from tools.tables import table, write_csv


@dataclass(frozen=True)
class Row:
    name: str
    size: int


def test_a_table_has_as_many_columns_as_names() -> None:
    assert table(["a", "b"], [[1, "x"], (2.5, "y")]) == "| a | b |\n|---|---|\n| 1 | x |\n| 2.5 | y |"


def test_rows_are_written_below_their_fields(tmp_path: Path) -> None:
    write_csv([Row("a", 1), Row("b", 2)], tmp_path / "rows.csv")
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    assert rows == [{"name": "a", "size": "1"}, {"name": "b", "size": "2"}]


def test_help_is_the_docstring_or_its_first_line() -> None:
    text = "Measures.\n\n    python tool.py    # as it stands"
    assert "    python tool.py    # as it stands" in parser_of(text).format_help()
    brief = parser_of(text, in_short=True).format_help()
    assert "Measures." in brief and "tool.py    #" not in brief


def test_a_process_finds_this_repository_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert (
        environment(A="1")["PYTHONPATH"] == f"{ROOT}{os.pathsep}elsewhere" and environment(A="1")["A"] == "1"
    )
    monkeypatch.delenv("PYTHONPATH")
    assert environment()["PYTHONPATH"] == str(ROOT)
    words = paddle_dp("train", Path("x.yaml"), "--ranks", 2)
    assert words == [sys.executable, "-m", "paddle_dp", "train", "x.yaml", "--ranks", "2"]


@pytest.mark.processes
def test_a_module_that_is_not_there_is_named() -> None:
    assert why_no_import(os.path.relpath(sys.executable), "json, csv") is None
    assert "no_such_module" in (why_no_import(sys.executable, "json, no_such_module") or "")
