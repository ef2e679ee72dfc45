"""Fleet's parallel layers over the bridge give a plain layer's outputs and gradients, in float32 and in bfloat16."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gloo.cases import start
from tests.ranks import run_ranks


def differences(ranks: int) -> dict[str, float]:
    """By layer and by what is compared: the largest difference from the plain layer."""
    from paddle.distributed.fleet.layers import mpu

    start({"tensor": ranks})
    column, row, vocabulary = mpu.ColumnParallelLinear, mpu.RowParallelLinear, mpu.VocabParallelEmbedding
    found: dict[str, float] = {}
    for gather in (True, False):
        layer = column(8, 16, has_bias=True, gather_output=gather)
        found |= linear(f"columns, gather_output {gather}", layer, cut_output=not gather)
        layer = row(16, 8, has_bias=True, input_is_parallel=not gather)
        found |= linear(f"rows, input_is_parallel {not gather}", layer, cut_input=not gather)
    found |= embedding(vocabulary(16, 8))
    return found | cross_entropies()


def numbers(*shape: int) -> Any:
    import numpy as np
    import paddle

    return paddle.to_tensor(np.random.default_rng(sum(shape)).normal(size=shape).astype("float32"))


def own(whole: Any, axis: int | None) -> Any:
    import paddle
    import paddle.distributed as dist

    return whole if axis is None else paddle.split(whole, dist.get_world_size(), axis)[dist.get_rank()]


def far(a: Any, b: Any) -> float:
    return float((a.astype("float32") - b.astype("float32")).abs().max().item())


def linear(name: str, layer: Any, cut_input: bool = False, cut_output: bool = False) -> dict[str, float]:
    """Output, input gradient, weight and bias gradients against paddle.nn.Linear."""
    import paddle

    inputs, outputs = (8, 16) if "columns" in name else (16, 8)
    plain = paddle.nn.Linear(inputs, outputs)
    plain.weight.set_value(numbers(inputs, outputs))
    plain.bias.set_value(numbers(outputs))
    layer.weight.set_value(own(plain.weight, layer.weight.split_axis))
    layer.bias.set_value(own(plain.bias, getattr(layer.bias, "split_axis", None)))
    x, weight_of = numbers(4, 3, inputs), numbers(4, 3, outputs)
    whole = x.clone()
    whole.stop_gradient = False
    (plain(whole) * weight_of).sum().backward()
    local = own(x, -1 if cut_input else None).clone()
    local.stop_gradient = False
    out = layer(local)
    (out * own(weight_of, -1 if cut_output else None)).sum().backward()
    return {
        f"{name}: output": far(out, own(plain(whole), -1 if cut_output else None)),
        f"{name}: input gradient": far(local.grad, own(whole.grad, -1 if cut_input else None)),
        f"{name}: weight gradient": far(layer.weight.grad, own(plain.weight.grad, layer.weight.split_axis)),
        f"{name}: bias gradient": far(
            layer.bias.grad, own(plain.bias.grad, getattr(layer.bias, "split_axis", None))
        ),
    }


def embedding(layer: Any) -> dict[str, float]:
    import paddle

    plain = paddle.nn.Embedding(16, 8)
    plain.weight.set_value(numbers(16, 8))
    layer.weight.set_value(own(plain.weight, 0))
    tokens, weight_of = paddle.to_tensor([[0, 3, 15, 7], [8, 9, 3, 3]]), numbers(2, 4, 8)
    for one in (layer, plain):
        (one(tokens) * weight_of).sum().backward()
    return {
        "vocabulary: output": far(layer(tokens), plain(tokens)),
        "vocabulary: gradient": far(layer.weight.grad, own(plain.weight.grad, 0)),
    }


def cross_entropies() -> dict[str, float]:
    """ParallelCrossEntropy with ignored rows, in both label shapes, with large logits, and in bfloat16."""
    import paddle
    from paddle.distributed.fleet.layers import mpu

    found, labels = {}, paddle.to_tensor([[0, 31, -100, 7], [8, 15, 16, -100]])
    for kind in ("float32", "bfloat16"):
        whole = (numbers(2, 4, 32) * 10).astype(kind)  # plain losses above 64 are cut off
        local = own(whole, -1).clone()
        whole.stop_gradient = local.stop_gradient = False
        expected = paddle.nn.functional.cross_entropy(whole.astype("float32"), labels, reduction="none")
        expected.sum().backward()
        layer = mpu.ParallelCrossEntropy(ignore_index=-100)
        got = layer(local, labels.unsqueeze(-1))
        got.astype("float32").sum().backward()
        assert got.dtype == local.grad.dtype == whole.dtype
        scale = 1 if kind == "float32" else 32  # bfloat16 keeps 8 bits of losses up to 64
        found[f"cross-entropy {kind}: loss"] = far(got.squeeze(-1), expected) / scale
        found[f"cross-entropy {kind}: gradient"] = far(local.grad, own(whole.grad, -1)) / scale
        found[f"cross-entropy {kind}: flat labels"] = far(layer(local, labels), got)
    return found | masked_classes()


def masked_classes() -> dict[str, float]:
    """Scores of -inf where ranks look for a label that another rank holds, and of the label that is ignored."""
    import paddle
    from paddle.distributed.fleet.layers import mpu

    labels, masked = paddle.to_tensor([0, 31, 7, 20]), [7, 8, 15, 16, 23, 24]
    whole = paddle.where(
        (paddle.arange(32).unsqueeze(-1) == paddle.to_tensor(masked)).any(-1), -float("inf"), numbers(4, 32)
    )
    local = own(whole, -1).clone()
    whole.stop_gradient = local.stop_gradient = False
    expected = paddle.nn.functional.cross_entropy(whole, labels, ignore_index=7, reduction="none")
    expected.sum().backward()
    got = mpu.ParallelCrossEntropy(ignore_index=7)(local, labels).squeeze(-1)
    got.sum().backward()
    assert bool(paddle.isfinite(expected).all())
    return {
        "masked classes: loss": float(paddle.nan_to_num(got, nan=99.0).subtract(expected).abs().max()),
        "masked classes: gradient": far(local.grad, own(whole.grad, -1)),
    }


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_parallel_layers_are_the_plain_ones(ranks: int) -> None:
    for rank, found in enumerate(run_ranks(differences, ranks, ranks, timeout=120)):
        assert len(found) == 26
        for name, difference in found.items():
            limit = 3e-2 if "bfloat16" in name else 2e-5
            assert difference <= limit, f"rank {rank}, {name}: off by {difference:.1e}"


def inputs_of_rank() -> list[Any]:
    """Nested inputs that differ between ranks, also in shape, after fleet's broadcast over the tensor axis."""
    import paddle
    import paddle.distributed as dist

    hcg, rank = start({"tensor": 2}), dist.get_rank()
    from paddle.distributed.fleet.utils.hybrid_parallel_util import broadcast_input_data

    first = paddle.full([2 + rank], rank + 1.0)
    nested = {"a": [paddle.full([], rank, "int64")]}
    (one, two), named = broadcast_input_data(hcg, first, nested, mask=first + 1)
    return [one.tolist(), two["a"][0].item(), named["mask"].tolist(), one is first]


def test_inputs_are_broadcast_from_the_first_tensor_rank() -> None:
    assert run_ranks(inputs_of_rank, 2, timeout=60) == [[[1.0, 1.0], 0, [2.0, 2.0], True]] * 2
