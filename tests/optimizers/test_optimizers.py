"""Every optimizer against its formula in NumPy: the update, who decays, and what is clipped, step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.regularizer import L1Decay

from paddle_dp import optimizers
from paddle_dp.optimizers import adafactor, adamw, lamb, lars, lion, momentum, muon, sgd

RATE, STEPS = 0.1, 4
Array = np.ndarray
Weights = dict[str, Array]
State = dict[str, Array]
Update = Callable[[Array, Array, float, State, int], Array]
SHELF: dict[str, Any] = {
    "sgd": sgd, "momentum": momentum, "adamw": adamw, "lamb": lamb, "lion": lion, "lars": lars,
    "adafactor": adafactor, "muon": muon,
}  # fmt: skip


def update_sgd(w: Array, g: Array, decay: float, kept: State, step: int) -> Array:
    return w - RATE * (g + decay * w)


def update_momentum(w: Array, g: Array, decay: float, kept: State, step: int) -> Array:
    kept["v"] = 0.9 * kept.get("v", 0) + g + decay * w
    return w - RATE * kept["v"]


def update_nesterov(w: Array, g: Array, decay: float, kept: State, step: int) -> Array:
    g = g + decay * w
    kept["v"] = 0.9 * kept.get("v", 0) + g
    return w - RATE * (g + 0.9 * kept["v"])


def adam(g: Array, kept: State, step: int, epsilon: float, beta2: float = 0.999) -> Array:
    kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * g
    kept["u"] = beta2 * kept.get("u", 0) + (1 - beta2) * g * g
    return (kept["m"] / (1 - 0.9**step)) / (np.sqrt(kept["u"] / (1 - beta2**step)) + epsilon)


def update_adamw(w: Array, g: Array, decay: float, kept: State, step: int) -> Array:
    return w * (1 - RATE * decay) - RATE * adam(g, kept, step, 1e-8)


def update_lamb(w: Array, g: Array, decay: float, kept: State, step: int) -> Array:
    way = adam(g, kept, step, 1e-6) + decay * w
    ratio = np.linalg.norm(w) / np.linalg.norm(way) if decay else 1.0
    return w - RATE * ratio * way


def update_lion(
    w: Array, g: Array, decay: float, kept: State, step: int, beta1: float = 0.9, beta2: float = 0.99
) -> Array:
    m = kept.get("m", 0 * g)
    kept["m"] = beta2 * m + (1 - beta2) * g
    return w - RATE * (np.sign(beta1 * m + (1 - beta1) * g) + decay * w)


def update_lars(
    w: Array, g: Array, decay: float, kept: State, step: int,
    momentum: float = 0.9, trust: float = 0.001, always_adapt: bool = False,
) -> Array:  # fmt: skip
    """Weights of zeros, which would never move, and parameters that do not decay are not adapted."""
    rate = 1.0
    if (decay or always_adapt) and w.any():
        rate = trust * np.linalg.norm(w) / (np.linalg.norm(g) + decay * np.linalg.norm(w))
    kept["v"] = momentum * kept.get("v", 0) + RATE * rate * (g + decay * w)
    return w - kept["v"]


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x**2)))


def update_adafactor(
    w: Array, g: Array, decay: float, kept: State, step: int,
    decay_rate: float = 0.8, clip_update: float = 1.0, relative: bool = True, epsilon2: float = 1e-3,
) -> Array:  # fmt: skip
    """Algorithm 4 for matrices, with sums as in the paper (a convolution's kernel belongs to its columns), and 5."""
    beta2, square = 1 - step**-decay_rate, (g**2 + 1e-30).reshape(len(g), -1)
    if g.ndim > 1:
        kept["r"] = beta2 * kept.get("r", 0) + (1 - beta2) * square.sum(1, keepdims=True)
        kept["c"] = beta2 * kept.get("c", 0) + (1 - beta2) * square.sum(0, keepdims=True)
        v = (kept["r"] @ kept["c"] / kept["r"].sum()).reshape(g.shape)
    else:
        kept["v"] = v = beta2 * kept.get("v", 0) + (1 - beta2) * (g**2 + 1e-30)
    u = g / np.sqrt(v)
    size = max(epsilon2, rms(w)) if relative else 1.0
    return w - RATE * decay * w - RATE * size * u / max(1.0, rms(u) / clip_update)


def newton_schulz(singular: Array, iterations: int) -> Array:
    for _ in range(iterations):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    return singular


def update_muon(
    w: Array, g: Array, decay: float, kept: State, step: int,
    momentum: float = 0.95, nesterov: bool = True, iterations: int = 5, scale: str = "shape",
    adamw_lr_scale: float = 0.015, beta2: float = 0.95,
) -> Array:  # fmt: skip
    if w.ndim == 1:
        rate = adamw_lr_scale * RATE
        return w * (1 - rate * decay) - rate * adam(g, kept, step, 1e-10, beta2=beta2)
    kept["m"] = m = momentum * kept.get("m", 0) + (1 - momentum) * g
    mean = momentum * m + (1 - momentum) * g if nesterov else m
    u, s, v = np.linalg.svd(mean.reshape(len(g), -1), full_matrices=False)
    outputs, inputs = (g.shape[1], g.shape[0]) if g.ndim == 2 else (len(g), g[0].size)
    factor = 0.2 * max(outputs, inputs) ** 0.5 if scale == "match_rms" else max(1, outputs / inputs) ** 0.5
    way = (u * newton_schulz(s / (np.linalg.norm(s) + 1e-7), iterations) @ v).reshape(g.shape)
    return w * (1 - RATE * decay) - RATE * factor * way


CASES: dict[str, tuple[str, dict[str, Any], Update]] = {
    "sgd": ("sgd", {}, update_sgd),
    "momentum": ("momentum", {}, update_momentum),
    "nesterov": ("momentum", {"nesterov": True}, update_nesterov),
    "adamw": ("adamw", {}, update_adamw),
    "lamb": ("lamb", {}, update_lamb),
    "lion": ("lion", {}, update_lion),
    "lars": ("lars", {}, update_lars),
    "adafactor": ("adafactor", {}, update_adafactor),
    "muon": ("muon", {"adamw": ()}, update_muon),
}


def layer() -> tuple[paddle.nn.Layer, Weights]:
    """A layer with a matrix, a bias and a norm, and its weights by name."""
    paddle.seed(0)
    model = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.LayerNorm(4))
    for parameter in model.parameters():
        parameter.set_value(paddle.rand(parameter.shape) + 0.5)
    return model, {name: parameter.numpy().astype("float64") for name, parameter in model.named_parameters()}


def gradients(weights: Weights) -> list[Weights]:
    random = np.random.default_rng(0)
    return [{name: random.normal(0, 2, w.shape) for name, w in weights.items()} for _ in range(STEPS)]


def run(config: Any, model: paddle.nn.Layer, grads: list[Weights]) -> Weights:
    if hasattr(config, "prepare"):
        config.prepare(model)
    optimizer = config.build(RATE, list(model.named_parameters()))
    for step in grads:
        for name, parameter in model.named_parameters():
            parameter.grad = paddle.to_tensor(step[name].astype("float32"))
        optimizer.step()
        optimizer.clear_grad()
    return {name: parameter.numpy() for name, parameter in model.named_parameters()}


def clipped(grads: Weights, clip: float | None, clip_value: float | None) -> Weights:
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    factor = clip / max(norm, clip) if clip else 1.0
    bound = clip_value or np.inf
    return {name: np.clip(g * factor, -bound, bound) for name, g in grads.items()}


def wanted(update: Update, weights: Weights, grads: list[Weights], decays: Callable[[str], float]) -> Weights:
    kept: dict[str, State] = {name: {} for name in weights}
    for step, gs in enumerate(grads, start=1):
        weights = {n: update(w, gs[n], decays(n), kept[n], step) for n, w in weights.items()}
    return weights


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("decay_all", [False, True])
@pytest.mark.parametrize("clip", [{}, {"clip": 1.5}, {"clip": 1e6}, {"clip_value": 0.3}])
def test_the_updates_are_the_formulas(case: str, decay_all: bool, clip: dict[str, float]) -> None:
    name, more, update = CASES[case]
    model, weights = layer()
    grads = gradients(weights)
    bounded = [clipped(gs, clip.get("clip"), clip.get("clip_value")) for gs in grads]
    expected = wanted(update, weights, bounded, lambda n: 0.2 if decay_all or weights[n].ndim > 1 else 0.0)
    config = SHELF[name].Config(weight_decay=0.2, decay_all=decay_all, **more, **clip)
    for key, value in run(config, model, grads).items():
        np.testing.assert_allclose(value, expected[key], rtol=2e-5, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("case", ["sgd", "momentum", "nesterov", "adamw", "lion", "adafactor", "muon"])
def test_without_decay_nothing_decays(case: str) -> None:
    name, more, update = CASES[case]
    model, weights = layer()
    grads = gradients(weights)
    expected = wanted(update, weights, grads, lambda n: 0.0)
    for key, value in run(SHELF[name].Config(weight_decay=0, **more), model, grads).items():
        np.testing.assert_allclose(value, expected[key], rtol=2e-5, atol=2e-6, err_msg=key)


def test_every_optimizer_of_the_shelf_has_a_row_here() -> None:
    assert (
        {*SHELF}
        == {name for name, _, _ in CASES.values()}
        == {file.stem for file in Path(optimizers.__file__).parent.glob("[!_]*.py")}
    )


@pytest.mark.parametrize("name", SHELF)
def test_check_counts_the_numbers_that_it_keeps(name: str) -> None:
    """`states` is an upper bound for each element, and the least that is one; Muon keeps fewer for hidden matrices."""
    model = paddle.nn.Sequential(paddle.nn.Linear(64, 64), paddle.nn.Linear(64, 64))
    config = SHELF[name].Config()
    if hasattr(config, "prepare"):
        config.prepare(model)
    optimizer = config.build(RATE, list(model.named_parameters()))
    model(paddle.ones([2, 64])).sum().backward()
    optimizer.step()
    kept = sum(t.size for key, t in optimizer.state_dict().items() if key != "LR_Scheduler" and t.size > 1)
    each = kept / sum(p.size for p in model.parameters())
    assert config.states - (name == "muon") - 0.1 < each < config.states + 0.1, f"{each:.3f} for each element"


@pytest.mark.parametrize("name", SHELF)
def test_two_clips_are_a_mistake(name: str) -> None:
    with pytest.raises(ValueError, match=r"^clip_value: give clip .* or clip_value .*, not both"):
        SHELF[name].Config(clip=1.0, clip_value=1.0)


def test_lamb_without_decay_would_not_be_lamb() -> None:
    with pytest.raises(ValueError, match=r"^weight_decay: .* always_adapt: true"):
        lamb.Config(weight_decay=0)
    model, weights = layer()
    grads = gradients(weights)
    expected = wanted(lambda w, g, d, k, s: update_lamb(w, g, 1e-300, k, s), weights, grads, lambda n: 0.0)
    for key, value in run(lamb.Config(weight_decay=0, always_adapt=True), model, grads).items():
        np.testing.assert_allclose(value, expected[key], rtol=2e-5, atol=2e-6, err_msg=key)


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_the_models_own_regularizer_stays(name: str) -> None:
    model, _ = layer()
    own = model[0].weight.regularizer = L1Decay(0.5)
    SHELF[name].Config(weight_decay=0.2, decay_all=True).build(RATE, list(model.named_parameters()))
    assert model[0].weight.regularizer is own
    assert model[0].bias.regularizer._coeff == 0.2


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_a_second_optimizer_does_not_inherit_the_decay_of_the_first(name: str) -> None:
    model, _ = layer()
    named = list(model.named_parameters())
    SHELF[name].Config(weight_decay=0.2, decay_all=True).build(RATE, named)
    SHELF[name].Config(weight_decay=0.1).build(RATE, named)
    assert [n for n, p in named if p.regularizer is not None] == ["0.weight"]
    assert model[0].weight.regularizer._coeff == 0.1
    SHELF[name].Config().build(RATE, named)
    assert all(p.regularizer is None for _, p in named)


@pytest.mark.parametrize("name", SHELF)
def test_the_rate_is_the_schedules(name: str) -> None:
    model, _ = layer()
    schedule = paddle.optimizer.lr.LambdaDecay(1.0, lambda step: 0.5**step)
    config = SHELF[name].Config()
    if hasattr(config, "prepare"):
        config.prepare(model)
    optimizer = config.build(schedule, list(model.named_parameters()))
    assert optimizer.get_lr() == 1.0
    schedule.step()
    assert optimizer.get_lr() == 0.5
