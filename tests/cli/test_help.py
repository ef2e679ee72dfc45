"""Every page of --help on terminals of two widths: lines that fill it, and no word of Typer's or Python's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from paddle_dp.cli.app import VERBS, command
from paddle_dp.cli.help import WIDEST, Verb, Verbs, paragraphs

NAMES = ("", *(verb.__name__ for verb in VERBS))


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("verb", NAMES)
def test_a_page_fills_the_terminal_and_is_never_broken_by_hand(
    verb: str,
    width: int,
    leave: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert leave(*filter(None, [verb, "--help"])) == 0
    page = capsys.readouterr().out
    lines = page.rstrip().split("\n")
    assert all(len(line) <= min(width, WIDEST) for line in lines)
    assert f"{lines[0]} ".startswith(f"Usage: {' '.join(['paddle-dp', verb]).strip()} [OPTIONS] ")
    assert not {"<bool>", "<path>", "None", "list["} & set(page.split()), "a type of Python's"
    for line, following in pairwise(lines):
        if following.startswith("  ") or not line.strip() or not following.strip():
            continue  # a row of a table; the end of a paragraph
        word = following.split()[0]
        assert len(f"{line.rstrip()} {word}") > min(width, WIDEST), f"broken: {line}"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_every_argument_and_option_says_what_it_is(verb: Callable[..., None]) -> None:
    assert isinstance(command(), Verbs)
    page = command().commands[verb.__name__]
    assert isinstance(page, Verb)
    for each in page.params:
        assert each.help and each.help.endswith((".", ")", "=64", "…")), each.name
        assert each.metavar or each.is_flag, f"{each.name} has no word for its value"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_every_name_of_an_option_is_on_the_page(
    verb: Callable[..., None], leave: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """`check` has --no-run, which its page did not list."""
    assert leave(verb.__name__, "--help") == 0
    rows = capsys.readouterr().out.partition("Options:")[2].split()
    options = [each for each in command().commands[verb.__name__].params if each.param_type_name == "option"]
    names = {name for each in options if not each.hidden for name in (*each.opts, *each.secondary_opts)}
    assert names <= {word.rstrip(",") for word in rows}


def test_paragraphs_are_lines() -> None:
    assert paragraphs("One\n    two.\n\n    Three.\n    ") == ["One two.", "Three."]
