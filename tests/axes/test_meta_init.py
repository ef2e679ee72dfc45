"""A rank's part that is built alone is what its rank would hold: shapes, names, and nothing else in memory."""

import paddle
import pytest
from paddle.distributed import fleet
from paddle.distributed.fleet.layers.mpu.random import get_rng_state_tracker

from paddle_dp.axes.meta_init import built, describe_weights, lazily
from paddle_dp.learner import Task
from paddle_dp.mesh import join
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.part import read_part
from paddle_dp.plan.layout import Layout, total_parameters
from tests.ranks import run_ranks

SMALL = {"vocab": 32, "width": 16, "depth": 2, "heads": 4, "length": 8}
MODELS = [
    {"use": "gpt", **SMALL},
    {"use": "gpt", **SMALL, "tied": True},
    {"use": "llama", **SMALL},
    {"use": "llama", **SMALL, "bias": "qkvo", "qk_norm": True, "head_width": 6},
    {"use": "large_classifier", "classes": 40, "cosines": True},
    {"use": "large_classifier", "classes": 40, "cosines": False},
    {"use": "vit", "image": 8, "patch": 4, "width": 16, "depth": 2, "heads": 4},
    {"use": "mlp"},
]


def sizes(layers):
    return sum(int(p.size) for p in {id(p): p for layer in layers for p in layer.parameters()}.values())


def described(model):
    with lazily():
        return describe_weights(model.build())


@pytest.mark.parametrize("settings", MODELS, ids=lambda s: s["use"])
def test_a_description_is_the_model_in_numbers_without_its_memory(settings):
    model = read_part("models", settings)
    state = paddle.get_rng_state()[0].__getstate__()
    blocks = described(model)
    assert paddle.get_rng_state()[0].__getstate__() == state
    assert total_parameters(blocks) == sizes([model.build()])


@pytest.mark.parametrize(
    "settings", MODELS[:6], ids=lambda s: f"{s['use']} {s.get('tied') or s.get('cosines')}"
)
def test_every_rank_s_part_can_be_built_and_is_as_planned(settings):
    model = read_part("models", settings)
    blocks = described(model)
    degrees = Degrees(tensor=2, pipeline=2 if len(blocks) > 1 else 1)
    for rank in range(degrees.ranks):
        mine = Layout(degrees=degrees).memory(blocks, rank)
        layers = built(model.build, mine.blocks, mine.coords["tensor"], 2)
        assert sizes(layers) == mine.parameters
        assert all(p._is_initialized() for layer in layers for p in layer.parameters())


def placed(settings):
    """What the ranks of a real job hold: name and shape of every parameter."""
    mesh = join(seed=0)
    strategy = read_part("strategies", {"use": "hybrid", "tensor": 2}).build(mesh)
    loss = read_part("losses", {"use": "cross_entropy"}).build()
    paddle.seed(3)
    model = read_part("models", settings).build()
    optimizer = lambda rate, named: paddle.optimizer.SGD(0.1, [p for _, p in named])  # noqa: E731
    learner = strategy.place(Task(model=model, loss=loss, optimizer=optimizer))
    return [[name, list(p.shape)] for name, p in learner.placed.named_parameters()]


def test_what_is_built_alone_is_what_a_real_rank_holds():
    model = read_part("models", MODELS[1])
    layers = built(model.build, range(4), 1, 2)
    mine = [[n, list(p.shape)] for n, p in paddle.nn.LayerList(layers).named_parameters()]
    for theirs in run_ranks(placed, 2, MODELS[1]):
        assert [[name.removeprefix("blocks."), shape] for name, shape in theirs] == mine


def test_building_leaves_no_trace_in_fleet():
    built(read_part("models", MODELS[0]).build, [1], 0, 2)
    assert getattr(fleet.fleet, "_user_defined_strategy", None) is None
    assert not get_rng_state_tracker().states_
