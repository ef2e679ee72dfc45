"""What a strategy's Config answers before there are processes: how a model will lie on so many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from paddle_dp.exchange.roundings import DIGITS, is_narrower
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.part import read_part
from paddle_dp.plan.layout import Layout, ReduceDtype
from paddle_dp.recipe import read_recipe
from paddle_dp.strategies._base import StrategyConfig
from paddle_dp.strategies.hybrid import Config as Hybrid
from paddle_dp.units import Every, Recompute

ROOT = Path(__file__).resolve().parents[2]


def layout(ranks: int, **settings: Any) -> Layout:
    config: StrategyConfig = read_part("strategies", settings).config
    return config.layout(ranks)


@pytest.mark.parametrize("use", ["single", "data_parallel", "hybrid"])
def test_the_plain_layout_is_the_whole_model_on_each_rank(use: str) -> None:
    buckets: dict[str, Any] = {"exchange": "auto", "bucket": 25 << 20} if use == "data_parallel" else {}
    assert layout(4, use=use) == Layout(degrees=Degrees(data=4), **buckets)
    again = layout(1, use=use, recompute="full")
    assert again.recompute == Recompute.parse("full") and again.degrees.ranks == 1


def test_auto_takes_the_ranks_that_the_other_axes_leave() -> None:
    assert layout(8, use="hybrid", tensor=2, pipeline=2).degrees == Degrees(data=2, tensor=2, pipeline=2)
    # Too few: refused elsewhere.
    assert layout(2, use="hybrid", tensor=4).degrees == Degrees(data=1, tensor=4)
    assert layout(8, use="hybrid", data=1, sharding=4, sequence=2).degrees.ranks == 8


def test_what_planning_and_pictures_ask_is_in_it() -> None:
    found = layout(2, use="hybrid", pipeline=2, pipeline_schedule="interleaved", partition="parameters")
    assert (found.virtual_stages, found.pipeline_schedule, found.partition) == (
        2,
        "interleaved",
        "parameters",
    )
    assert layout(2, use="hybrid", pipeline=2, virtual_stages=3).virtual_stages == 3
    assert layout(2, use="hybrid", virtual_stages=3).virtual_stages == 1  # without stages there is one
    zero = layout(2, use="hybrid", sharding=2, sharding_stage=3)
    assert zero.sharding_stage == 3 and not zero.sequence_parallel
    assert layout(2, use="hybrid", tensor=2, sequence_parallel=True).sequence_parallel


@pytest.mark.parametrize("dtype", [*get_args(ReduceDtype), "float16"])  # no recipe names the last one
def test_a_dtype_with_fewer_digits_than_a_weight_promises_no_whole_training(dtype: Any) -> None:
    """A new one with 16 bits counted as promised: `verify` would have compared whole trainings."""
    config, recipe = Hybrid(reduce_dtype=dtype), read_recipe(ROOT / "configs/digits_mlp.yaml")
    narrow, sentence = is_narrower(dtype, "float32"), config.not_promised(recipe)
    assert config.compared_by_step == narrow == bool(sentence)
    assert config.layout(2).gradient_on_its_way == (2 if narrow else 4)
    if narrow:
        assert f"strategy.reduce_dtype={dtype} " in sentence and f"to {DIGITS[dtype]} digits" in sentence
    assert not Hybrid().compared_by_step


def test_a_strategy_without_more_to_say_has_defaults() -> None:
    mine = StrategyConfig()
    mine.refuse(read_recipe(ROOT / "configs/digits_mlp.yaml"), ranks=64)
    assert mine.check_every == Every.parse("100 steps") and mine.layout(3).degrees == Degrees(data=3)
