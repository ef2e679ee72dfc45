"""What sharding cannot do is one sentence before any process starts."""

import pytest

from paddle_dp.axes.sharding.prefetch_trace import TraceRecorder
from paddle_dp.errors import UsageError
from paddle_dp.plan.sharded import chunks, max_fetched, most_on_accelerator, travels, unshardable
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


def test_layers_travel_together_until_all_owners_send_the_same() -> None:
    assert chunks([[8, 0], [0, 8], [8, 0], [0, 8]]) == [0, 0, 1, 1]
    assert chunks([[8, 0], [0, 8], [0, 8], [8, 0]]) == [0, 0, 1, 1]
    assert chunks([[1, 0], [8, 0], [0, 9]]) == [0, 0, 0]  # a norm goes with the next
    assert chunks([[8, 0]] * 6) == [0, 0, 0, 1, 1, 1]  # one owner alone: as much as 1.5 layers a rank
    assert chunks([[8]] * 3) == [0, 1, 2]
    assert chunks([[0, 0], [0, 0]]) == [0, 0]


def test_one_chunk_is_at_work_and_one_under_way() -> None:
    layers = [[8, 0], [0, 8], [8, 0], [0, 8], [8, 0], [0, 8]]
    assert max_fetched(layers, 0, prefetch=0) == 8
    assert max_fetched(layers, 0, prefetch=1) == 16
    assert max_fetched(layers, 1, prefetch=2) == 24
    assert max_fetched([[8, 8]], 0, prefetch=1) == 16  # forth and back: once, or as much again


def test_an_accelerator_has_copies_of_what_is_sent_and_the_gradients_of_a_chunk():
    layers = [[8, 8]] * 3
    assert chunks(layers * 2) == [0, 0, 0, 1, 1, 1]
    others, own = 24, 24  # of each chunk
    gradients = others + own
    launched = others + gradients + others + own  # with a copy of what is sent, and room for what comes
    assert most_on_accelerator(layers, 0, prefetch=1) == launched - own  # in the room of the sums


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize(
    "order", [[0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0], [0, 1, 2, 2, 1, 0] * 2, [3, 1, 4, 1, 5, 0, 2, 3]]
)
def test_the_plan_fetches_what_a_rank_fetches(order: list[int], ahead: int) -> None:
    """As `TraceRecorder` finds it in a pass, in which layers run in this order, one parameter each."""
    loads = [[8, 0], [0, 8], [8, 0], [1, 0], [0, 8], [0, 9]]
    diary = TraceRecorder()
    for layer in order:
        diary.need((layer,))
        diary.release(layer)
    fetched = [bool(travel) for travel in diary.order(loads, ahead).travels]
    assert fetched == travels(tuple(order), tuple(map(tuple, loads)), ahead)
