"""Models: the shapes they take and give, their settings, and that each can learn and be built again alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from models import bert, convnet, gpt, llama, mlp, resnet, vit


def parameters(model: nn.Layer) -> int:
    return sum(int(p.size) for p in model.parameters() if not p.stop_gradient)


def convolutions(model: nn.Layer) -> list[nn.Conv2D]:
    return [layer for layer in model.sublayers() if isinstance(layer, nn.Conv2D)]


CASES: dict[str, tuple[Any, list[int]]] = {
    "mlp": (mlp.Config(inputs=12, hidden=(8,), classes=3, activation="gelu", dropout=0.1), [5, 12]),
    "mlp without hidden layers": (mlp.Config(inputs=12, hidden=(), classes=3), [5, 12]),
    "mlp on images": (mlp.Config(inputs=12, hidden=(8, 4), classes=3), [5, 3, 2, 2]),
    "convnet": (convnet.Config(channels=2, widths=(4, 8), classes=3), [5, 2, 8, 8]),
    "convnet on odd images": (
        convnet.Config(channels=2, widths=(4, 8), classes=3, norm="none", activation="gelu", pool="mean"),
        [5, 2, 9, 7],
    ),
    "resnet on small images": (resnet.Config(depth=18, classes=3, small_images=True), [2, 3, 32, 32]),
    "resnet": (resnet.Config(depth=18, classes=3), [2, 3, 64, 64]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_scores_each_sample_and_every_parameter_learns(case: str) -> None:
    config, shape = CASES[case]
    model = config.build()
    scores = model(paddle.rand(shape))
    assert scores.shape == [shape[0], 3]
    scores.square().sum().backward()
    learned = {name: p.grad for name, p in model.named_parameters() if not p.stop_gradient}
    assert [name for name, grad in learned.items() if grad is None] == []


@pytest.mark.parametrize(
    "config",
    [
        mlp.Config(hidden=(8,)),
        convnet.Config(),
        pytest.param(resnet.Config(depth=18, classes=4), marks=pytest.mark.long),
    ],
)
def test_one_seed_one_model(config: Any) -> None:
    def weights(seed: int) -> list[np.ndarray]:
        paddle.seed(seed)
        return [parameter.numpy() for parameter in config.build().parameters()]

    first, again, other = weights(1), weights(1), weights(2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_mlp_has_the_layers_it_says() -> None:
    model = mlp.Config(inputs=64, hidden=(32, 16), classes=10).build()
    assert parameters(model) == 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10
    assert not [layer for layer in model.sublayers() if isinstance(layer, nn.Dropout)]
    dropping = mlp.Config(hidden=(32, 16), dropout=0.5, activation="tanh").build()
    assert [layer.p for layer in dropping.sublayers() if isinstance(layer, nn.Dropout)] == [0.5, 0.5]
    assert len([layer for layer in dropping.sublayers() if isinstance(layer, nn.Tanh)]) == 2


def test_convnet_normalizes_on_request() -> None:
    with_norm = convnet.Config(widths=(4, 8)).build()
    without = convnet.Config(widths=(4, 8), norm="none").build()
    assert len([layer for layer in with_norm.sublayers() if isinstance(layer, nn.BatchNorm2D)]) == 2
    assert all(layer.bias is None for layer in convolutions(with_norm))
    assert not [layer for layer in without.sublayers() if isinstance(layer, nn.BatchNorm2D)]
    assert all(layer.bias is not None for layer in convolutions(without))


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_resnet_is_paddles(depth: Any) -> None:
    with paddle.LazyGuard():  # shapes are enough: nothing is drawn
        theirs = getattr(paddle.vision.models, f"resnet{depth}")(num_classes=10)
        ours = resnet.Config(depth=depth, classes=10).build()
    shapes = {name: p.shape for name, p in theirs.named_parameters()}
    assert {name: p.shape for name, p in ours.named_parameters()} == shapes


def test_resnet_for_small_images_keeps_their_size_in_the_stem() -> None:
    model = resnet.Config(depth=18, classes=4, small_images=True).build()
    images = paddle.rand([1, 3, 32, 32])
    assert model.maxpool(model.conv1(images)).shape == [1, 64, 32, 32]
    plain = resnet.Config(depth=18, classes=4).build()
    assert plain.maxpool(plain.conv1(images)).shape == [1, 64, 8, 8]


def test_resnet_may_be_wide() -> None:
    with paddle.LazyGuard():
        wide = resnet.Config(depth=50, classes=4, width=128).build()
    assert wide.layer1[0].conv2.weight.shape == [128, 128, 3, 3]


@pytest.mark.parametrize(
    ("module", "settings", "complaint"),
    [
        (mlp, {"inputs": 0}, "inputs: 0 is less than 1"),
        (mlp, {"classes": -1}, "classes: -1 is less than 1"),
        (mlp, {"hidden": (8, 0)}, r"hidden: widths are 1 or more, not \[8, 0\]"),
        (mlp, {"dropout": 1.0}, "dropout: 1.0 is not from 0 to below 1"),
        (convnet, {"widths": ()}, "widths: give one or more"),
        (convnet, {"channels": 0}, "channels: 0 is less than 1"),
        (resnet, {"classes": 0}, "classes: 0 is less than 1"),
        (resnet, {"depth": 18, "width": 128}, "width: depth 18 has blocks of width 64 only"),
        (resnet, {"width": 0}, "width: 0 is less than 1"),
        (vit, {"width": 16, "heads": 5}, "heads: 5 does not divide width 16"),
        (vit, {"image": 8, "patch": 3}, "patch: 3 does not divide image 8"),
        (vit, {"classes": 0}, "classes: 0 is less than 1"),
        (vit, {"dropout": -0.1}, "dropout: -0.1 is not from 0"),
        (gpt, {"heads": 3, "width": 128}, "heads: 3 does not divide width 128"),
        (gpt, {"vocab": 0}, "vocab: 0 is less than 1"),
        (gpt, {"depth": -1}, "depth: -1 is less than 1"),
        (gpt, {"dropout": 1.0}, "dropout: 1.0 is not from 0 to below 1"),
        (bert, {"width": 16, "heads": 3}, "heads: 3 does not divide width 16"),
        (bert, {"vocab": 0}, "vocab: 0 is less than 1"),
        (bert, {"dropout": 1.0}, "dropout: 1.0 is not from 0 to below 1"),
        (llama, {"heads": 3, "width": 128}, "heads: 3 does not divide width 128"),
        (llama, {"kv_heads": 3}, "kv_heads: 3 does not divide heads 4"),
        (llama, {"width": 12, "heads": 4}, "heads: 4 of width 12 are 3 wide"),
        (llama, {"hidden": 0}, "hidden: 0 is less than 1"),
        (llama, {"epsilon": 0.0}, r"epsilon: 0\.0 is not above 0"),
        (llama, {"rope_factor": 0.5}, r"rope_factor: 0\.5 is less than 1"),
        (llama, {"rope_low": 4.0}, r"rope_low: 4\.0 is not from 0 to below rope_high 4\.0"),
    ],
)
def test_a_setting_that_makes_no_model_is_named(
    module: Any, settings: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=f"^{complaint}"):
        module.Config(**settings)


@pytest.mark.parametrize("module", [gpt, bert])
def test_dropout_is_for_training_only(module: Any) -> None:
    tokens = paddle.to_tensor(np.random.default_rng(0).integers(0, 20, (2, 8)))
    model = module.Config(vocab=20, width=16, depth=2, heads=4, length=12, dropout=0.5).build()
    assert (model(tokens) != model(tokens)).any()
    model.eval()
    assert (model(tokens) == model(tokens)).all()
