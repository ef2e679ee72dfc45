"""Updates of convolutions, 16-bit weights, zeros and LoRA factors, and which parameters Muon makes orthogonal."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.core.lora import add_low_rank
from paddle_dp.core.updates import DECAY_KEY, ByParameter, is_hidden_matrix, mark, orthogonalized
from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.optimizers import adafactor, lars, lion, muon
from tests.optimizers.test_optimizers import (
    gradients,
    run,
    update_adafactor,
    update_lars,
    update_lion,
    update_muon,
    wanted,
)

CONFIGS: dict[str, Any] = {
    "lion": lion.Config(weight_decay=0.2),
    "lars": lars.Config(weight_decay=0.2),
    "adafactor": adafactor.Config(weight_decay=0.2),
    "muon": muon.Config(weight_decay=0.2, adamw=()),
}
UPDATES = {"lion": update_lion, "lars": update_lars, "adafactor": update_adafactor, "muon": update_muon}


def test_each_class_of_updates_has_its_formula_here() -> None:
    assert {kind.__name__.lower() for kind in ByParameter.__subclasses__()} == set(CONFIGS) == set(UPDATES)


class Net(nn.Layer):
    """A convolution, matrices of both shapes, an embedding, a raw matrix and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(5, 4)
        self.position = self.create_parameter([3, 4])
        self.conv = nn.Conv2D(2, 6, [3, 2])
        self.wide, self.tall, self.head = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 3)
        self.norm = nn.LayerNorm(4)


def shapes() -> nn.Layer:
    paddle.seed(0)
    return nn.Sequential(nn.Conv2D(2, 6, [3, 2]), nn.Linear(4, 9), nn.Linear(9, 4))


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CONFIGS),
    ("lion", {"beta1": 0.5, "beta2": 0.7}),
    ("lars", {"momentum": 0.5, "trust": 0.3}),
    ("lars", {"trust": 0.3, "always_adapt": True}),
    ("adafactor", {"decay_rate": 0.5, "clip_update": 0.3}),
    ("adafactor", {"relative": False}),
    ("adafactor", {"epsilon2": 10.0}),
    ("muon", {"momentum": 0.5, "nesterov": False, "iterations": 3}),
    ("muon", {"scale": "match_rms", "adamw_lr_scale": 1.0, "beta2": 0.8}),
]


@pytest.mark.parametrize(
    ("name", "settings", "dtype", "decay"),
    [
        *((*row, "float32", 0.2) for row in SETTINGS),
        *((name, {}, "float32", 0.0) for name in CONFIGS),  # a group's decay of 0 counts
        *((name, {}, "float64", 0.2) for name in CONFIGS),  # to its last places
    ],
)
def test_an_update_is_the_formulas(name: str, settings: dict[str, Any], dtype: str, decay: float) -> None:
    """Of convolutions and matrices of both shapes, with each setting."""
    model = shapes().to(dtype=dtype)
    weights = {key: p.numpy().astype("float64") for key, p in model.named_parameters()}
    grads = [{k: g.astype("float32").astype("float64") for k, g in gs.items()} for gs in gradients(weights)]
    if decay == 0:
        model[1].weight.optimize_attr = {**model[1].weight.optimize_attr, DECAY_KEY: 0.0}
    decays = {key: decay if key == "1.weight" else 0.2 * (weights[key].ndim > 1) for key in weights}
    expected = wanted(partial(UPDATES[name], **settings), weights, grads, decays.__getitem__)
    rtol, atol = (1e-4, 1e-5) if dtype == "float32" else (1e-10, 1e-12)
    for key, value in run(replace(CONFIGS[name], **settings), model, grads).items():
        np.testing.assert_allclose(value, expected[key], rtol=rtol, atol=atol, err_msg=key)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_weight_in_16_bits_is_rounded_from_a_float32_copy(name: str, dtype: str) -> None:
    model = shapes().to(dtype=dtype)
    named = list(model.named_parameters())
    weights = {key: p.astype("float64").numpy() for key, p in named}
    grads = [
        {key: paddle.to_tensor(g, dtype=dtype).astype("float64").numpy() for key, g in gs.items()}
        for gs in gradients(weights)
    ]
    expected = wanted(UPDATES[name], weights, grads, lambda key: 0.2 if weights[key].ndim > 1 else 0.0)
    config = CONFIGS[name]
    if hasattr(config, "prepare"):
        config.prepare(model)
    optimizer = config.build(0.1, named)
    for gs in grads:
        for key, parameter in named:
            parameter.grad = paddle.to_tensor(gs[key], dtype=dtype)
        optimizer.step()
        optimizer.clear_grad()
    for key, parameter in named:
        copy = optimizer._master_weights[parameter.name]
        np.testing.assert_allclose(copy.numpy(), expected[key], rtol=1e-4, atol=1e-5, err_msg=key)
        assert parameter.dtype == getattr(paddle, dtype)
        assert bool((parameter == copy.astype(dtype)).all())
    assert all(
        state.dtype == paddle.float32 for state in optimizer.state_dict().values() if hasattr(state, "dtype")
    )


def test_a_weight_of_zeros_moves_under_lars() -> None:
    model = nn.Linear(2, 2)
    model.weight.set_value(paddle.zeros([2, 2]))
    ones = {"weight": np.ones([2, 2]), "bias": np.zeros(2)}
    found = run(lars.Config(), model, [ones])
    np.testing.assert_allclose(found["weight"], -0.1)
    still = run(lars.Config(), nn.Linear(2, 2), [{"weight": np.zeros([2, 2]), "bias": np.zeros(2)}])
    assert np.isfinite(still["weight"]).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_of_zeros_give_finite_weights(name: str) -> None:
    model = shapes()
    zeros = {key: np.zeros(p.shape) for key, p in model.named_parameters()}
    assert all(np.isfinite(value).all() for value in run(CONFIGS[name], model, [zeros, zeros]).values())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_parameter_without_dims_is_updated_as_a_vector_of_one(name: str) -> None:
    found = []
    for shape in ([], [1]):
        model = shapes()
        model.add_parameter(
            "scale", model.create_parameter(shape, default_initializer=nn.initializer.Constant(0.7))
        )
        grads = [{key: np.full(p.shape, size) for key, p in model.named_parameters()} for size in (0.3, 0.2)]
        found.append(run(CONFIGS[name], model, grads)["scale"])
    assert found[0].shape == () and found[0] != np.float32(0.7)
    np.testing.assert_array_equal(found[0], found[1][0])


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5)])
def test_an_orthogonalized_matrix_has_singular_values_near_1(shape: tuple[int, int]) -> None:
    paddle.seed(1)
    matrix = paddle.randn(shape, dtype="float64")
    found = orthogonalized(matrix, 5).numpy()
    u, _, v = np.linalg.svd(matrix.numpy(), full_matrices=False)
    values = np.diag(u.T @ found @ v.T)
    assert values.min() > 0.6 and values.max() < 1.3
    np.testing.assert_allclose(u * values @ v, found, atol=1e-9)


def hidden(model: nn.Layer, adamw: tuple[str, ...] | None) -> set[str]:
    muon.Config(adamw=adamw).prepare(model)
    return {name for name, p in model.named_parameters() if is_hidden_matrix(p)}


def test_hidden_matrices_are_weights_of_linear_layers_and_convolutions_but_for_the_last() -> None:
    assert hidden(Net(), None) == {"conv.weight", "wide.weight", "tall.weight"}
    assert hidden(Net(), ()) == {"conv.weight", "wide.weight", "tall.weight", "head.weight"}
    assert hidden(Net(), ("head", "c*.weight")) == {"wide.weight", "tall.weight"}


def test_an_embedding_that_is_also_the_head_is_no_hidden_matrix() -> None:
    model = Net()
    model.head = nn.Linear(5, 4, bias_attr=False)
    model.head.weight = model.token.weight
    assert hidden(model, ()) == {"conv.weight", "wide.weight", "tall.weight"}


def test_factors_of_lora_are_matrices_and_those_of_the_head_are_not() -> None:
    model = Net()
    add_low_rank(model, ["tall", "head"], 2, 1.0, seed=0)
    assert {"tall.lora_A", "tall.lora_B"} <= hidden(model, None)
    assert not {"head.lora_A", "head.lora_B"} & hidden(model, None)


def test_a_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(
        RecipeError, match=r"optimizer\.adamw\.1: 'haed' matches no parameter\. Did you mean 'head'\?"
    ):
        muon.Config(adamw=("token", "haed")).prepare(Net())


def test_what_muon_does_with_each_parameter_is_told() -> None:
    assert muon.Config().prepare(Net()) == [
        "muon makes the updates of 3 matrices orthogonal: conv.weight, wide.weight, tall.weight",
        "AdamW updates the other 9 parameters: position, token.weight, conv.bias, wide.bias, …",
    ]


def test_the_products_of_an_update_are_those_of_the_matrices_that_muon_updates() -> None:
    """A plan counted AdamW's head and embedding, and no convolution."""
    model = Net()
    muon.Config().prepare(model)
    sides = ((6, 12), (4, 8), (4, 8))  # conv [6, 2 · 3 · 2], wide, tall
    wanted = 3 * sum(4 * m * m * n + 2 * m**3 for m, n in sides)
    assert muon.Config(iterations=3).update_flops(model.parameters()) == wanted
    model.conv.weight.stop_gradient = True
    assert (
        muon.Config(iterations=1).update_flops([model.conv.weight, model.tall.weight]) == 4 * 16 * 8 + 2 * 64
    )


def test_without_a_look_at_the_whole_model_muon_is_refused() -> None:
    with pytest.raises(UsageError, match=r"is not marked .* `prepare\(model\)`"):
        muon.Config().build(0.1, list(nn.Linear(2, 2).named_parameters()))


@pytest.mark.parametrize(
    ("name", "size"), [("lion", 1200), ("lars", 1200), ("adafactor", 71), ("muon", 1200)]
)
def test_the_states_of_a_matrix_have_the_sizes_that_the_docs_tell(name: str, size: int) -> None:
    model, config = nn.Linear(40, 30), CONFIGS[name]
    muon.Config(adamw=()).prepare(model)
    shapes_by_state = config.build(0.1, list(model.named_parameters())).state_shapes(model.weight)
    assert sum(int(np.prod(shape)) for shape in shapes_by_state.values()) == size


def test_no_hidden_matrix_counts_as_the_head_of_a_tied_model():
    """The last linear layer of a tied GPT is the last block's `down`, and had AdamW's small rate."""
    from models.gpt import Config

    for tied in (True, False):
        model = Config(width=16, depth=1, heads=2, vocab=8, length=4, tied=tied).build()
        mark(model, None)
        matrices = [name for name, p in model.named_parameters() if is_hidden_matrix(p)]
        assert [name.split(".")[2] for name in matrices] == ["qkv", "out", "up", "down"]
