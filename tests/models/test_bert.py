"""What is bert's own: it sees both sides, and says what every token was."""

import paddle
import pytest

from models.bert import Config

SMALL = {"vocab": 20, "width": 16, "depth": 2, "heads": 4, "length": 12}


@pytest.fixture
def model():
    paddle.seed(1)
    made = Config(**SMALL).build()
    for parameter in made.parameters():  # initial weights of 0.02 leave every score next to 0
        parameter.set_value(parameter + paddle.randn(parameter.shape) * 0.2)
    return made


def test_scores_of_every_token(model, tokens, every_parameter_learns):
    assert model(tokens(12)).shape == [2, 12, 20]
    every_parameter_learns(model, tokens(12))
    hidden = tokens(7)
    for block in model.blocks:
        hidden = block(hidden)
    assert (hidden == model(tokens(7))).all()


def test_a_token_sees_those_before_and_behind_it(model, tokens):
    text = tokens(10)
    changed = text.clone()
    changed[:, 6] = (text[:, 6] + 1) % 20
    assert ((model(text) - model(changed)).abs().amax([0, 2]) > 1e-4).all()


def test_what_can_be_cut_is_there(model):
    for block in model.blocks:
        assert {name: way for name, way in block.cuts.items() if not hasattr(block, name)} == {}


def test_dropout_is_for_training_only(tokens, drops_in_training_only):
    drops_in_training_only(Config(**SMALL, dropout=0.5).build(), tokens(8))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"heads": 3}, "heads: 3 does not divide width 16"),
        ({"vocab": 0}, "vocab: 0 is less than 1"),
        ({"dropout": 1.0}, "dropout: 1.0 is not from 0 to below 1"),
    ],
)
def test_a_mistake_is_met_at_the_door(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config(**SMALL | wrong)
