"""The tree of errors, and the near miss behind "did you mean"."""

from __future__ import annotations

from paddle_dp.errors import (
    InstallError,
    Mistake,
    RecipeError,
    did_you_mean,
    gist,
    near,
)


def test_a_recipe_error_tells_all_mistakes_a_line_each() -> None:
    error = RecipeError(Mistake(where=f"a.yaml:{n}", message="wrong") for n in (1, 2))
    assert str(error) == "a.yaml:1: wrong\na.yaml:2: wrong"
    assert [m.where for m in error.mistakes] == ["a.yaml:1", "a.yaml:2"]


def test_a_mistake_without_a_place_is_its_words() -> None:
    assert str(Mistake(where="", message="model gpt needs 'vocab'")) == "model gpt needs 'vocab'"


def test_near_finds_typing_mistakes_only() -> None:
    assert near("widht", ["depth", "width"]) == "width"
    assert near("colour", ["depth", "width"]) is None


def test_did_you_mean_lists_what_is_allowed() -> None:
    assert did_you_mean("widht", ["width", "depth"]) == " Did you mean 'width'? It takes depth, width."
    assert did_you_mean("x", []) == " It takes nothing."
    assert did_you_mean("x", ["b", "a"], "On the shelf:") == " On the shelf: a, b."


def test_a_missing_paddle_is_told_with_both_commands() -> None:
    said = str(InstallError.missing_paddle())
    assert "pip install -e '.[cpu]'" in said and "paddlepaddle-gpu" in said and "paddlepaddle.org.cn" in said


def test_the_gist_of_an_error_of_paddles_is_not_the_operator_that_it_was_in() -> None:
    hints = (
        "  [Hint: holder_ should not be null.] (at dense_tensor_impl.cc:38)\n  [operator < linear > error]"
    )
    assert gist(ValueError(f"In transformed code:\n\n  PreconditionNotMetError: No memory.\n{hints}")) == (
        "PreconditionNotMetError: No memory."
    )
    assert (
        gist(ValueError(f"(InvalidArgument) The types differ.\n{hints}"))
        == "(InvalidArgument) The types differ."
    )
    assert gist(ValueError("one line")) == "one line"
    assert gist(ValueError("In code:\n  it stands still")) == "it stands still"
    assert gist(ValueError()) == ""
