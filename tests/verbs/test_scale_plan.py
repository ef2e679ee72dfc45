"""`paddle-dp scale`: its screen, object and picture follow from measured steps; what it cannot scale is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.cli import main
from paddle_dp.errors import UsageError
from paddle_dp.plan.error_bars import SCALING
from paddle_dp.plan.scaling import MeasuredSteps
from paddle_dp.recipe import read_recipe
from paddle_dp.verbs.layout_plan import doublings
from paddle_dp.verbs.scale import probe_lines, product_shapes
from paddle_dp.verbs.scale_plan import ScalePlan, check_scalable, gradient_bytes
from tests.plan.test_probe import probe
from tests.plan.test_scaling import steps

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MEASURED = (steps(1, 64, 0.074), steps(1, 32, 0.042), steps(2, 64, 0.090), steps(2, 32, 0.055))
LINK = 125e6


def plan(
    measured: tuple[MeasuredSteps, ...] = MEASURED, link: float | None = LINK, last: int = 64, **changes: Any
) -> ScalePlan:
    recipe = read_recipe(CONFIGS / "digits_mlp.yaml", ["strategy.use=data_parallel"])
    rates = replace(probe(ranks=2 if len(measured) > 2 else 1), **changes)
    return ScalePlan.make(recipe, rates, measured, last, link)


def test_numbers_double_up_to_the_last() -> None:
    assert doublings(1, 64) == [1, 2, 4, 8, 16, 32, 64]
    assert doublings(1, 6) == [1, 2, 4, 6] and doublings(1, 1) == [1]


def test_the_measured_number_of_ranks_has_a_row() -> None:
    three = (*MEASURED[:2], steps(3, 64, 0.1))
    shown = plan(three, last=8, ranks=3, node=3)
    assert [(each.ranks, each.kind) for each in shown.weak[:4]] == [
        (1, "measured"), (2, "foretold"), (3, "measured"), (4, "foretold"),
    ]  # fmt: skip
    assert shown.weak[1].seconds < shown.weak[2].seconds


def test_the_exchange_is_that_of_check() -> None:
    """102,016 … parameters of 4 bytes; hybrid in bfloat16 sends half as many."""
    recipe = read_recipe(CONFIGS / "digits_mlp.yaml")
    size = gradient_bytes(recipe)
    assert size == 4 * (64 * 256 + 256 + 256 * 256 + 256 + 256 * 10 + 10)
    half = "strategy={use: hybrid, reduce_dtype: bfloat16}"
    assert gradient_bytes(read_recipe(CONFIGS / "digits_mlp.yaml", [half])) == size / 2


def test_the_screen_has_100_columns_and_says_what_was_measured() -> None:
    lines = [*plan().lines()]
    assert max(map(len, lines)) <= 100, max(lines, key=len)
    text = "\n".join(lines)
    assert "*74 ms (66.6 … 88.8)" in text and "*90 ms" in text
    assert "a second rank pay? yes: 1.64 times" in text
    assert "published: " in text and "times 1.28" in text
    assert "from 1 rank and the collectives alone" in text
    assert not any(word in text for word in ("≤", "inf", "nan"))


def test_strong_scaling_stops_where_the_batch_does() -> None:
    assert [each.ranks for each in plan(last=128).strong] == [1, 2, 4, 8, 16, 32, 64]
    rows = [line for line in plan(last=128).lines() if line.startswith("  128")]
    assert "the batch is not divisible" in rows[0]


def test_without_a_network_rows_beyond_the_machine_are_bounds() -> None:
    bound = plan(link=None)
    assert [each.kind for each in bound.weak] == ["measured", "measured", *["bound"] * 5]
    text = "\n".join(bound.lines())
    assert "add --link SPEED" in text.replace("\n  ", " ") and "≤" in text
    assert json.loads(json.dumps(bound.as_fields(), allow_nan=False))["weak"][-1]["high"] is None


def test_without_collectives_there_are_bytes_and_the_bound_alone() -> None:
    alone = plan(MEASURED[:2])
    assert {each.kind for each in alone.weak} == {"measured", "bound"}
    text = "\n".join(alone.lines())
    assert (
        "No collectives were measured" in text
        and "pay?" not in text
        and "foretold after a measurement" in text
    )


def test_the_answer_is_no_or_unknown_where_it_is() -> None:
    slow = (*MEASURED[:2], steps(2, 64, 0.300), steps(2, 32, 0.2))
    assert "pay? no: 0.49" in "\n".join(plan(slow).lines())
    wide = MeasuredSteps(ranks=2, samples=64, seconds=0.1, low=0.05, high=0.4)
    text = " ".join("\n".join(plan((*MEASURED[:2], wide)).lines()).split())
    assert "it cannot be told" in text and "Rounds of the same steps differ by up to 8.0 times" in text


def test_changes_are_in_the_order_of_their_gain_and_small_ones_are_left_out() -> None:
    gains = [gain for gain, _ in plan().changes()]
    assert gains == sorted(gains, reverse=True) and gains[0] > 0
    even = (steps(1, 64, 6.4), steps(1, 32, 3.2), steps(2, 64, 6.4), steps(2, 32, 3.2))
    assert "No change of batch or exchange gives 3 %" in "\n".join(plan(even, last=2).lines())


def test_accelerators_have_the_bar_of_published_points() -> None:
    cards = plan(kind="gpu", machine={"processor": "EPYC", "cards": [{"model": "V100"}]})
    assert cards.model.bar == SCALING and cards.model.hides
    assert "a second card pay?" in "\n".join(cards.lines())


def test_the_picture_is_drawn() -> None:
    for each in (plan(), plan(link=None), plan(MEASURED[:2])):
        picture = each.draw()
        assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("digits_local_sgd", (), "add strategy.use=data_parallel"),
        ("gpt_tensor2", (), "scale measures 1 rank and several"),
        (
            "gpt_tiny",
            ("train.batch=7", "train.micro_batches=2"),
            "2 of them do not divide train.batch .7.: add",
        ),
    ],
)
def test_other_steps_are_refused(name: str, overrides: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        check_scalable(read_recipe(CONFIGS / f"{name}.yaml", overrides))


def test_mistakes_are_met_before_a_process_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(CONFIGS / "digits_mlp.yaml")
    for words, sentence in (
        (["--link", "fast"], "--link"), (["--to", "0"], "--to 0"), (["--ranks", "0"], "--ranks 0"),
        (["--minutes", "nan"], "--minutes nan"), (["--png", "/nowhere/a.png"], "--png"),
        (["--measured", str(tmp_path / "none.json")], "scale RECIPE --probe"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            main(["scale", recipe, *words])
        assert end.value.code == 2 and sentence in capsys.readouterr().err


def test_products_are_those_of_the_blocks() -> None:
    recipe = read_recipe(CONFIGS / "gpt_tiny.yaml", ["train.batch=8", "train.micro_batches=2"])
    tokens = 8 // 2 * 16
    assert product_shapes(recipe) == [
        (tokens, 96, 32), (tokens, 32, 32), (tokens, 128, 32), (tokens, 32, 128), (tokens, 64, 32),
    ]  # fmt: skip
    mlp = product_shapes(read_recipe(CONFIGS / "digits_mlp.yaml"))
    assert mlp == [(64, 256, 256), (64, 256, 64), (64, 10, 256)]  # most FLOPs first
    assert any("GFLOP/s" in line for line in probe_lines(probe()))
