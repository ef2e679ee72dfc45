"""Full-width punctuation in a recipe, the commonest slip of a Chinese keyboard: the refusal names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paddle_dp.errors import RecipeError
from paddle_dp.recipe import read_recipe

RECIPE = """model: {use: mlp, inputs: 64, hidden: [64], classes: 10}
dataset: {use: digits}
loss: {use: cross_entropy}
optimizer: {use: adamw}
schedule: {use: cosine, learning_rate: 5e-3}
train: {length: 3 epochs, batch: 64}
"""
TRAIN = "train: {length: 3 epochs, batch: 64}"


def refusal(folder: Path, before: str = "", after: str = "", *overrides: str) -> str:
    assert before in RECIPE
    (folder / "a.yaml").write_text(RECIPE.replace(before, after) if before else RECIPE)
    with pytest.raises(RecipeError) as caught:
        read_recipe(folder / "a.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "hint"),
    [
        ("mlp, ", "mlp， ", "Line 1 has the full-width '，', which may be the cause: write ','."),
        ("dataset: {", "dataset：{", "Line 2 has the full-width '：': write ':'."),
        (
            "{use: digits}",
            "｛use: digits｝",
            "Line 2 has the full-width '｛', '｝', which may be the cause: write '{', '}'.",
        ),
        ("[64]", "[64，64]", "Line 1 has the full-width '，': write ','."),
        ("[64]", "［64］", "Line 1 has the full-width '［', '］': write '[', ']'."),
        ("3 epochs", "“3 epochs”", "Line 6 has the full-width '“', '”': write '\"', '\"'."),
        (
            TRAIN,
            "train：\n  length: 3 epochs",
            "Line 6 has the full-width '：', which may be the cause: write ':'.",
        ),
        (
            TRAIN,
            "训练：  # 三轮\n\n  # 长度\n  length: 3",
            "Line 6 has the full-width '：', which may be the cause: write ':'.",
        ),
        ("{use: digits}", "{use：digits}", "Line 2 has the full-width '：': write ':'."),
        ("64}", "６４}", "Line 6 has the full-width '６４': write '64'."),
        ("3 epochs", "‘3’", "Line 6 has the full-width '‘', '’': write \"'\", \"'\"."),
        (
            "inputs: 64, ",
            "inputs: 64，\n  ",
            "Line 1 has the full-width '，', which may be the cause: write ','.",
        ),
        (
            "{use: digits}",
            "｛\n use: digits}",
            "Line 2 has the full-width '｛', which may be the cause: write '{'.",
        ),
        (
            TRAIN,
            "train:\n\u3000\u3000length: 3",
            "Line 7 has the full-width '\u3000': write ' '.",
        ),
    ],
)
def test_a_refusal_names_the_character(before: str, after: str, hint: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, before, after)
    assert message.count(hint) == message.count("full-width") == 1, message


@pytest.mark.parametrize(
    ("space", "name"),
    [
        ("\u200b", "ZERO WIDTH SPACE (U+200B)"),
        ("\u00a0", "NO-BREAK SPACE (U+00A0)"),
        ("\ufeff", "ZERO WIDTH NO-BREAK SPACE (U+FEFF)"),
    ],
)
def test_a_refusal_names_a_space_that_cannot_be_seen(space: str, name: str, tmp_path: Path) -> None:
    """A key beside itself, "has no setting 'batch'. Did you mean 'batch'?", was all that was said."""
    for key in (f"{space}batch", f"batch{space}", f"bat{space}ch"):
        message = refusal(tmp_path, "batch: 64", f"batch: 64, {key}: 64")
        assert message.endswith(f" Line 6 has the character {name}: delete it, or write ' '."), message
    assert f"Line 4 has the character {name}" in refusal(tmp_path, "use: adamw", f"use: adamw{space}")
    assert f"It has the character {name}" in refusal(tmp_path, "", "", f"train.bat{space}ch=64")
    honest = refusal(tmp_path, "{use: digits}", f"{{use: digits, path: 数据{space}新, bathc: 3}}")
    assert "has the character" not in honest


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("model.hidden=[64，64]", "It has the full-width '，': write ','."),
        ("train.batch＝64", "It has the full-width '＝', which may be the cause: write '='."),
        ("model.hidden=[64，{]", "It has the full-width '，', which may be the cause: write ','."),
        ("callbacks.“a”.every=3", "It has the full-width '“', '”': write '\"', '\"'."),
        ("train.batch：64", "It has the full-width '：', which may be the cause: write ':'."),
    ],
)
def test_an_override_is_looked_at_as_well(override: str, hint: str, tmp_path: Path) -> None:
    assert hint in refusal(tmp_path, "", "", override)


@pytest.mark.parametrize(
    ("before", "after", "override"),
    [
        ("{use: digits}", "{use: digits, path: 数据（new）, bathc: 3}", ""),
        ("model:", "nmae: don’t\nmodel:", ""),
        ("model:", "name: 模型（v2）\nmodel: ]", ""),  # YAML refuses the line below
        ("{use: digits}", "{use: digits, path: 数据（new）]", ""),  # no syntax of YAML
        ("model:", 'name: "a \\"：b"\nmodel: ]', ""),
        ("model:", "name: 'it''s：b'\nmodel: ]", ""),
        ("model:", "name: |\n  数据：new\nmodel: ]", ""),
        ("model:", "name: a，b“c” model：d\nmodel: ]", ""),
        ("", "", "nmae=模型（v2）"),
    ],
)
def test_an_honest_text_is_not_blamed(before: str, after: str, override: str, tmp_path: Path) -> None:
    message = refusal(tmp_path, before, after, *filter(None, [override]))
    assert "full-width" not in message, message


def test_a_chinese_text_is_no_mistake(tmp_path: Path) -> None:
    """The mistake is another one of that line: the text in quotes or between Chinese characters, and the comment, are
    right."""
    named = RECIPE.replace(
        "{use: digits}", '{use: digits, prompt: "你好，", name: 你好，世界}  # 数据：digits'
    )
    (tmp_path / "b.yaml").write_text(named)
    with pytest.raises(RecipeError, match="has no setting 'prompt'") as caught:
        read_recipe(tmp_path / "b.yaml")
    assert "full-width" not in str(caught.value)
    (tmp_path / "c.yaml").write_text(f"name: 第一次，手写数字：“很小”\n{RECIPE}")
    assert read_recipe(tmp_path / "c.yaml").name == "第一次，手写数字：“很小”"
