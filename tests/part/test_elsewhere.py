import pytest

from paddle_dp.part.elsewhere import PLACES, place_of
from paddle_dp.recipe import read_recipe


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("lr", "schedule.learning_rate"),
        ("learning_rate", "schedule.learning_rate"),
        ("lrr", "schedule.learning_rate"),
        ("Batch_Size", "train.batch"),
    ],
)
def test_other_tools_words_are_known(word, place):
    assert place_of(word) == place


def test_a_word_that_nobody_has_says_nothing():
    assert place_of("wibble") is None
    assert place_of("lrr", exactly=True) is None and place_of("lr", exactly=True) == "schedule.learning_rate"


@pytest.mark.parametrize("place", sorted(set(PLACES.values())))
def test_every_place_is_one_that_a_recipe_has(place):
    """The places are overrides of a recipe: `read_recipe` would refuse one that is not there."""
    values = {
        "schedule.learning_rate": "0.1", "schedule.warmup": "1 steps", "train.length": "1 epochs", "train.batch": "8",
        "train.micro_batches": "1", "train.precision": "float32", "train.seed": "1",
        "train.drop_last": "true", "loader.num_workers": "0",
        "optimizer.clip": "1.0", "strategy.data": "1", "strategy.tensor": "1", "strategy.pipeline": "1",
        "strategy.sharding": "1", "strategy.sharding_stage": "1", "output_dir": "x",
    }  # fmt: skip
    read_recipe("configs/gpt_tiny.yaml", [f"{place}={values[place]}"])
