"""YAML 1.2 as plain values with a line for each key."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.errors import RecipeError
from paddle_dp.recipe import read_recipe
from paddle_dp.recipe.yaml_document import parse, read_page


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4), ("1_000", 1000), ("012", 12), ("0o17", 15), ("1.", 1.0), ("'3'", "3"), ("yes", "yes"),
        ("off", "off"), ("true", True), ("~", None), ("", None), ("2020-01-01", "2020-01-01"), ("12:30", "12:30"),
        ("3 epochs", "3 epochs"), ("[1, a]", [1, "a"]), ("{a: {b: 1}}", {"a": {"b": 1}}), ("{1: a}", {"1": "a"}),
        ("[&x {a: 1}, *x]", [{"a": 1}, {"a": 1}]),
    ],
)  # fmt: skip
def test_values(text: str, value: Any) -> None:
    page = parse(text, "a.yaml")
    assert not page.mistakes and page.values == value and type(page.values) is type(value)


def test_every_key_and_item_has_its_line() -> None:
    page = parse("a: 1\nb:\n  c: 2\n  d:\n    - 3\n    - {e: 4}\n", "a.yaml")
    lines = {path: place for path, place in page.source_lines.items() if path}
    assert lines == {
        ("a",): "a.yaml:1", ("b",): "a.yaml:2", ("b", "c"): "a.yaml:3", ("b", "d"): "a.yaml:4",
        ("b", "d", 0): "a.yaml:5", ("b", "d", 1): "a.yaml:6", ("b", "d", 1, "e"): "a.yaml:6",
    }  # fmt: skip
    assert page.source_line(("b", "nowhere", "x")) == "a.yaml:2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3", "a.yaml:3: 'a' is set twice, first on line 1"),
        ("a: {b: 1,\n b: 2}", "a.yaml:2: 'b' is set twice, first on line 1"),
        ("a: 1\nb: [1", "a.yaml:2: this is not YAML: while parsing a flow sequence, expected ',' or ']'"),
        (
            "a:\n\tb: 1",
            "a.yaml:2: this is not YAML: while scanning for the next token, found character '\\t'",
        ),
        ("a: b: c", "a.yaml:1: this is not YAML: mapping values are not allowed here"),
        ("--- {a: 1}\n--- {b: 1}", "a.yaml:2: this is not YAML: expected a single document"),
        ("a: \x00", "a.yaml: this is not YAML: unacceptable character"),
        (
            "a: !!python/object/apply:os.system [ls]",
            "a.yaml:1: the tag tag:yaml.org,2002:python/object/apply",
        ),
        ("a: &x [*x]", "a.yaml:1: an alias of a group around it has no place in a recipe"),
        ("a: !!int x", "a.yaml:1: 'x' does not fit its tag"),
        ("- " * 4000, "a.yaml: this is not YAML: maximum recursion"),
    ],
)
def test_one_mistake(text: str, said: str) -> None:
    (mistake,) = parse(text, "a.yaml").mistakes
    assert str(mistake).startswith(said)


def test_all_repeated_keys_are_told_and_the_first_value_stays() -> None:
    page = parse("a: 1\na: 2\nb: {c: 1, c: 2}\n", "a.yaml")
    assert [m.where for m in page.mistakes] == ["a.yaml:2", "a.yaml:3"]
    assert page.values == {"a": 1, "b": {"c": 1}}


def test_a_page_without_lines() -> None:
    assert (
        str(parse("{a: 1, a: 2}", "override 'x'", numbered=False).mistakes[0])
        == "override 'x': 'a' is set twice"
    )


def test_a_file_is_a_page(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes("\ufeffname: grün".encode())
    assert read_page(file).values == {"name": "grün"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "a.yaml: is empty: a recipe begins with"),
        (b"# nothing\n", "a.yaml: is empty"),
        (b"- a\n- b\n", "a.yaml: is not a group of settings"),
        (b"a: 1\nb: \xff\n", "a.yaml:2: is not text in UTF-8"),
        (b"a: [1", "a.yaml:1: this is not YAML"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        read_page(tmp_path / "a.yaml")
    assert str(caught.value).startswith(f"{tmp_path}/{said}") and "\n" not in str(caught.value)


def test_a_script_in_place_of_a_recipe_is_told(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import paddle\n")
    with pytest.raises(
        RecipeError, match=r"own\.py: is a script, .* `paddle-dp launch` and `paddle-dp audit`"
    ):
        read_page(tmp_path / "own.py")


def test_a_file_that_is_not_there_is_told_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "digits_mlp.yaml").touch()
    with pytest.raises(RecipeError, match=r"no such file. Did you mean 'digits_mlp.yaml'\?$"):
        read_page(tmp_path / "digit_mlp.yaml")
    for number in range(10):
        (tmp_path / f"a{number}.yaml").touch()
    with pytest.raises(RecipeError, match=r"no such file. Next to it: a0.yaml, .*, a7.yaml and 3 more\.$"):
        read_page(tmp_path / "nothing.yaml")
    with pytest.raises(RecipeError, match=r"no such file\.$"):
        read_page(tmp_path / "nowhere" / "a.yaml")


def test_a_folder_is_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").touch()
    with pytest.raises(RecipeError, match=r"is a folder, not a recipe. Did you mean .*/a.yaml\?"):
        read_page(tmp_path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(RecipeError, match=r"a.yaml: cannot be read: Permission denied"):
        read_page(tmp_path / "a.yaml")


def bomb(depth: int) -> str:
    """Nine aliases of nine aliases of …"""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    return "\n".join([*lines, *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, depth))])


def test_aliases_are_bounded_by_what_they_stand_for() -> None:
    assert not parse(bomb(3), "a.yaml").mistakes
    begun = time.process_time()
    for depth in (6, 9, 40):
        (mistake,) = parse(bomb(depth), "a.yaml").mistakes
        assert (
            str(mistake)
            == "a.yaml: stands for more than 50000 values, its aliases written out: no recipe needs so many"
        )
    assert time.process_time() - begun < 5


def test_a_recipe_of_the_size_of_data_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("\n".join(f"key_{number}: 1" for number in range(60_000)))
    begun = time.process_time()
    with pytest.raises(RecipeError, match=r"a.yaml: is larger than 128 KB: that is data, not a recipe"):
        read_page(tmp_path / "a.yaml")
    assert time.process_time() - begun < 1


def test_many_keys_are_told_apart_in_calls_that_grow_as_they_do(tmp_path: Path) -> None:
    """Calls are counted, not seconds: four times as many keys may not take sixteen times as many."""

    def calls(keys: int) -> int:
        (tmp_path / "a.yaml").write_text("\n".join(f"key_{number}: 1" for number in range(keys)))
        count = 0

        def add(_frame: Any, event: str, _argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(add)
        try:
            with pytest.raises(RecipeError):
                read_recipe(tmp_path / "a.yaml")
        finally:
            sys.setprofile(before)
        return count

    calls(30)
    assert calls(120) < 5 * calls(30)


def test_brackets_within_brackets_are_bounded() -> None:
    for text in ("a: " + "[" * 5000, "a: " + "{b: " * 13000, "a: " + "[" * 101 + "]" * 101):
        began = time.process_time()
        assert "opens more than 100 brackets" in str(parse(text, "x").mistakes[0])
        assert time.process_time() - began < 0.5
    assert not parse("a: " + "[" * 99 + "]" * 99, "x").mistakes
