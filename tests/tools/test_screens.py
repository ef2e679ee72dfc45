"""tools/screens.py: the cells of a terminal after a command's control sequences, and the picture of a real command."""

from __future__ import annotations

import re
import sys
from html import unescape
from pathlib import Path

import pytest
from rich.text import Text

from tools import screens


def _shown(text: str, columns: int = 20, rows: int = 9) -> str:
    screen = screens.Screen(columns)
    screen.feed(text)
    return Text.from_ansi(screen.ansi(rows)).plain


def test_what_is_overwritten_or_erased_is_gone():
    assert _shown("abc\rX\r\nnext") == "Xbc\nnext"
    assert _shown("kept\r\n\x1b[38;5;70mbar\x1b[0m\r\n\x1b[1A\x1b[2K\x1b[?25hdone") == "kept\ndone"
    assert _shown("a long line\r\x1b[Kb") == "b"
    assert _shown("0123456789", columns=4) == "0123\n4567\n89"
    assert _shown("1\r\n2\r\n3\r\n\r\n", rows=2) == "2\n3"


def test_a_colour_stays_with_its_cell():
    screen = screens.Screen(20)
    screen.feed("\x1b[31mred\x1b[0m plain")
    text = Text.from_ansi(screen.ansi(9))
    assert [text.plain[span.start : span.end] for span in text.spans if span.style.color] == ["r", "e", "d"]


@pytest.mark.parametrize("sequence", ["\x1b[5B", "\x1b]0;title\x07", "\x1b[3K"])
def test_an_unknown_sequence_is_refused(sequence):
    with pytest.raises(ValueError, match="unknown control sequence"):
        _shown(f"before{sequence}after")


@pytest.mark.processes
def test_the_picture_of_a_command_is_still_and_loads_nothing(tmp_path: Path, monkeypatch, capfd):
    picture = tmp_path / "screen.svg"
    command = [sys.executable, "-c", "import os; print(os.isatty(1), os.get_terminal_size().columns)"]
    monkeypatch.setattr(sys, "argv", ["screens.py", str(picture), "--", *command])
    assert screens.main() == 0
    drawing = picture.read_text()
    assert "True 100" in unescape(re.sub(r"<[^>]*>", " ", drawing)).replace("\xa0", " ")
    assert not re.search(r"@font-face|url\(http|animation|keyframes", drawing)
