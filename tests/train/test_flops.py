"""A model's FLOPs are the published ones, and counting them leaves no trace."""

from __future__ import annotations

import math
from typing import Any

import paddle
import pytest

from paddle_dp.callbacks.dashboard.utilisation import training_flops
from paddle_dp.part import find

T, L, W = 32, 3, 64
DECODERS: dict[str, dict[str, Any]] = {
    "gpt": {"heads": 4},
    "tied": {"heads": 4, "tied": True},
    "llama": {"heads": 4, "kv_heads": 2, "hidden": 96},
    "wide llama": {"heads": 4, "kv_heads": 2, "hidden": 96, "head_width": 32, "qk_norm": True},
}


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_needs_what_the_paper_says(name: str) -> None:
    """6N + 12LHQT per token (PaLM, appendix B); N counts the weights that multiply: no embedding that is looked up."""
    word = "gpt" if name == "tied" else name.split()[-1]
    config = find("models", word)(vocab=100, width=W, depth=L, length=T, **DECODERS[name])
    looked_up = {"blocks.0.position"} | (set() if name == "tied" else {"blocks.0.token.weight"})
    named = dict(config.build().named_parameters())
    weights = sum(math.prod(p.shape) for n, p in named.items() if p.ndim == 2 and n not in looked_up)
    heads = DECODERS[name]["heads"] * DECODERS[name].get("head_width", W // DECODERS[name]["heads"])
    assert training_flops(config.build, [T], "int64") == T * (6 * weights + 12 * L * heads * T)


def test_a_resnet_50_needs_8_gflop_forward() -> None:
    """4.1 billion multiply-adds a 224 × 224 image (torchvision prints 4.09)."""
    config = find("models", "resnet")(depth=50)
    assert training_flops(config.build, [3, 224, 224], "float32") / 3 / 2 == pytest.approx(4.09e9, rel=1e-3)


def test_counting_draws_nothing_and_names_nothing() -> None:
    config = find("models", "mlp")(inputs=4, hidden=(3,), classes=2, dropout=0.5)
    paddle.seed(5)
    expected = paddle.rand([3]).tolist()
    paddle.seed(5)
    assert training_flops(config.build, [4], "float32") == 3 * 2 * (4 * 3 + 3 * 2)
    assert paddle.rand([3]).tolist() == expected and paddle.in_dynamic_mode()


def test_counting_takes_no_names_from_layers_made_later() -> None:
    config = find("models", "mlp")(inputs=4, hidden=(3,), classes=2)
    with paddle.utils.unique_name.guard():
        training_flops(config.build, [4], "float32")
        assert paddle.nn.Linear(2, 2).weight.name == "linear_0.w_0"
