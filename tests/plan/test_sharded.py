"""What sharding cannot do is one sentence before any process starts."""

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.plan.sharded import unshardable
from paddle_dp.recipe import read_recipe


def test_what_can_be_sharded_is_not_refused() -> None:
    assert unshardable(2, 2, False, False, "cpu") is None
    assert unshardable(2, 1, True, True, "gpu") is None
    assert unshardable(1, 2, False, True, "cpu") is None


@pytest.mark.parametrize(
    ("overrides", "ranks", "device", "said"),
    [
        (["strategy.sharding=2", "strategy.offload=true"], 2, "cpu", "there is no GPU here: set"),
        (["strategy.offload=true"], 2, "gpu", "set strategy.sharding to 2 or more"),
        (["strategy.sharding=2", "strategy.pipeline=2", "model.tied=true"], 4, "cpu", "pipeline share"),
        (["strategy.sharding=3"], 2, "cpu", "Legal on 2 ranks, nearest first: sharding 2"),
    ],
)  # fmt: skip
def test_a_recipe_is_refused(overrides: list[str], ranks: int, device: str, said: str) -> None:
    recipe = read_recipe("configs/gpt_tiny.yaml", overrides)
    with pytest.raises(UsageError, match=said):
        recipe.strategy.config.refuse(recipe, ranks, device)


@pytest.mark.parametrize(
    "overrides", [[], ["strategy.sharding=2", "strategy.sharding_stage=3"], ["strategy.sharding=4"]]
)
def test_data_auto_is_what_sharding_leaves(overrides: list[str]) -> None:
    recipe = read_recipe("configs/gpt_tiny.yaml", overrides)
    recipe.strategy.config.refuse(recipe, 4)
    degrees = recipe.strategy.config.layout(4).degrees
    assert degrees.data * degrees.sharding == 4
