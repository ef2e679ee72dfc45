"""What a model wrote, on a screen and elsewhere."""

from __future__ import annotations

import sys

import pytest

from paddle_dp.verbs.generate import show, visible

ODD = "if x:\n\treturn 'é 猫'\r\x1b[31m\x00\x7f\x85\u202e\ufffd"


def test_what_a_terminal_would_obey_is_an_escape() -> None:
    assert visible(ODD) == "if x:\n\treturn 'é 猫'\\r\\x1b[31m\\x00\\x7f\\x85\\u202e\ufffd"
    assert visible("plain\ntext\t") == "plain\ntext\t"


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_is_spared(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    show(ODD)
    assert capsys.readouterr().out == (visible(ODD) if terminal else ODD) + "\n"
