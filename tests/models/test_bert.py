"""What is bert's own: it sees both sides, and says what every token was."""

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest

from models.bert import Config
from paddle_dp.axes.tensor.layers import TensorParallelizer
from paddle_dp.core.placement import Placements
from paddle_dp.gloo.fake_group import alone

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


def test_a_text_is_of_the_first_task_and_segment(tokens):
    model = Config(**SMALL, segments=4, tasks=3).build()
    model(tokens(9)).square().sum().backward()
    embedding = model.blocks[0]
    for kinds in (embedding.segment, embedding.task):
        assert kinds.grad[0].abs().max() > 0 and kinds.grad[1:].abs().max() == 0
    assert (embedding.segment.grad[0] == embedding.task.grad[0]).all()
    with pytest.raises(ValueError, match="tasks: -1 is less than 0"):
        Config(**SMALL, tasks=-1)


def test_blocks_and_the_output_layer_have_the_activation():
    paddle.seed(0)
    _, block, _, head = Config(**SMALL, activation="relu").build().blocks
    x = paddle.randn([2, 5, 16])
    mixed = block.norm1(x + block.out(block._attend(block.qkv(x))))
    assert (block(x) == block.norm2(mixed + block.down(F.relu(block.up(mixed))))).all()
    assert (head(x) == head.out(head.norm(F.relu(head.dense(x))))).all()


def test_what_can_be_cut_is_there(model):
    for block in model.blocks:
        assert {name: way for name, way in block.cuts.items() if not hasattr(block, name)} == {}


def test_the_bias_of_a_tied_output_is_cut_with_its_embedding():
    model = Config(vocab=8, width=4, depth=1, heads=2, length=4, tied=True, segments=2).build()
    weight, bias = (model.state_dict()[f"blocks.2.out.{word}"] for word in ("weight", "bias"))
    bias.set_value(paddle.arange(8, dtype="float32"))
    weight, bias = weight.numpy(), bias.numpy()
    with alone(1, 2) as group:
        parallelizer = TensorParallelizer(group, Placements())
        assert parallelizer.replace(model) and parallelizer.cuts_classes
    cut = model.state_dict()
    np.testing.assert_array_equal(cut["blocks.2.out.bias"].numpy(), bias[4:])
    np.testing.assert_array_equal(cut["blocks.2.out.weight"].numpy(), weight[4:])
    assert cut["blocks.2.out.weight"] is cut["blocks.0.token.weight"]
    shard = parallelizer.placements.placement_of(cut["blocks.2.out.bias"]).shard
    assert (shard.dim, shard.rank, shard.size) == (0, 1, 2)


def test_texts_use_the_first_segment():
    model = Config(vocab=8, width=4, depth=1, heads=2, length=4, segments=2).build()
    plain = Config(vocab=8, width=4, depth=1, heads=2, length=4).build()
    tokens = paddle.zeros([1, 3], "int64")
    plain.set_state_dict({k: v for k, v in model.state_dict().items() if k != "blocks.0.segment"})
    assert float((model(tokens) - plain(tokens)).abs().max()) > 1e-6
    model.blocks[0].segment.set_value(paddle.to_tensor([[0.0] * 4, [9.0] * 4]))
    assert float((model(tokens) - plain(tokens)).abs().max()) == 0
