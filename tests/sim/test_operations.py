"""The device computes what the CPU computes, operations and their gradients: its kernels are the CPU's, lent without
copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import nn

from paddle_dp.core.extra_forwards import random_state
from paddle_dp.mesh.device import on
from tests.ranks import run_ranks

Tensors = Sequence[paddle.Tensor]


def normal(*shape: int, dtype: str = "float32") -> paddle.Tensor:
    x = paddle.to_tensor(np.random.randn(*shape).astype("float32")).astype(dtype)
    x.stop_gradient = False
    return x


def whole(*shape: int, below: int) -> paddle.Tensor:
    return paddle.to_tensor(np.random.randint(0, below, shape))


def view(x: paddle.Tensor) -> paddle.Tensor:
    return x[:, 1:5].transpose([1, 0]).reshape([2, 6])


def joined(x: paddle.Tensor) -> paddle.Tensor:
    return paddle.stack([paddle.concat(paddle.split(x, 2, 1)[::-1], 1), x])


def picked(x: paddle.Tensor, at: paddle.Tensor) -> paddle.Tensor:
    return paddle.where(x[at] > 0, x[at], paddle.gather(x, at) * 2)


def in_place(x: paddle.Tensor) -> paddle.Tensor:
    y = x * 1
    y.scale_(0.5)
    y[1:3] = 5.0
    return y.add_(x)


# A name, then what makes a layer (or None) and the inputs, then how they are used.
Case = tuple[Callable[[], Any], Callable[[], Tensors], Callable[..., Any]]
CASES: dict[str, Case] = {
    "linear": (lambda: nn.Linear(8, 4), lambda: [normal(3, 8)], lambda f, x: f(x)),
    "layer norm": (lambda: nn.LayerNorm(8), lambda: [normal(3, 8)], lambda f, x: f(x)),
    "softmax": (lambda: F.softmax, lambda: [normal(3, 8)], lambda f, x: f(x)),
    "convolution": (lambda: nn.Conv2D(3, 4, 3, padding=1), lambda: [normal(2, 3, 8, 8)], lambda f, x: f(x)),
    "depthwise convolution": (lambda: nn.Conv2D(4, 4, 3, groups=4), lambda: [normal(2, 4, 8, 8)], lambda f, x: f(x)),
    "batch norm": (lambda: nn.BatchNorm2D(3), lambda: [normal(2, 3, 8, 8)], lambda f, x: f(x)),
    "group norm": (lambda: nn.GroupNorm(2, 4), lambda: [normal(2, 4, 8, 8)], lambda f, x: f(x)),
    "max pool": (lambda: partial(F.max_pool2d, kernel_size=2), lambda: [normal(2, 3, 8, 8)], lambda f, x: f(x)),
    "average pool": (lambda: nn.AdaptiveAvgPool2D(1), lambda: [normal(2, 3, 8, 8)], lambda f, x: f(x)),
    "embedding": (lambda: nn.Embedding(10, 4), lambda: [whole(3, 5, below=10)], lambda f, x: f(x)),
    "cross entropy": (lambda: F.cross_entropy, lambda: [normal(6, 10), whole(6, below=10)], lambda f, x, y: f(x, y)),
    "smoothed cross entropy": (
        lambda: partial(F.cross_entropy, label_smoothing=0.1),
        lambda: [normal(6, 10), whole(6, below=10)],
        lambda f, x, y: f(x, y),
    ),
    "dropout": (lambda: partial(F.dropout, p=0.5), lambda: [normal(30, 8)], lambda f, x: f(x)),
    "attention": (
        lambda: partial(F.scaled_dot_product_attention, is_causal=True),
        lambda: [normal(2, 5, 2, 4), normal(2, 5, 2, 4), normal(2, 5, 2, 4)],
        lambda f, q, k, v: f(q, k, v),
    ),
    "LSTM": (lambda: nn.LSTM(4, 6), lambda: [normal(2, 5, 4)], lambda f, x: f(x)[0]),
    "multi-head attention": (lambda: nn.MultiHeadAttention(8, 2), lambda: [normal(2, 5, 8)], lambda f, x: f(x)),
    "gelu": (lambda: F.gelu, lambda: [normal(3, 8)], lambda f, x: f(x)),
    "silu": (lambda: F.silu, lambda: [normal(3, 8)], lambda f, x: f(x)),
    "views": (lambda: view, lambda: [normal(3, 8)], lambda f, x: f(x)),
    "split, concat, stack": (lambda: joined, lambda: [normal(4, 8)], lambda f, x: f(x)),
    "gather, index, where": (lambda: picked, lambda: [normal(4, 8), whole(3, below=4)], lambda f, x, at: f(x, at)),
    "in place": (lambda: in_place, lambda: [normal(4, 8)], lambda f, x: f(x)),
    "einsum": (
        lambda: partial(paddle.einsum, "ij,jk->ik"),
        lambda: [normal(4, 8), normal(8, 3)],
        lambda f, x, y: f(x, y),
    ),
    "top k": (lambda: partial(paddle.topk, k=3), lambda: [normal(3, 8)], lambda f, x: f(x)[0]),
    "sort, cumsum": (lambda: paddle.sort, lambda: [normal(3, 8)], lambda f, x: paddle.cumsum(f(x), 1)),
    "interpolate": (
        lambda: partial(F.interpolate, scale_factor=2, mode="bilinear"),
        lambda: [normal(1, 3, 8, 8)],
        lambda f, x: f(x),
    ),
}  # fmt: skip
CLIP = nn.ClipGradByGlobalNorm(0.5)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda p, **how: paddle.optimizer.AdamW(
        1e-2, parameters=p, weight_decay=0.1, grad_clip=CLIP, **how
    ),
    "momentum": lambda p, **how: paddle.optimizer.Momentum(1e-2, parameters=p, grad_clip=CLIP, **how),
    "sgd": lambda p, **how: paddle.optimizer.SGD(1e-2, parameters=p, **how),
    "lamb": lambda p, **how: paddle.optimizer.Lamb(1e-2, parameters=p, **how),
}


def given(case: Case) -> list[Any]:
    """What an operation gives on the current device, and its gradients, as arrays."""
    paddle.seed(7)
    np.random.seed(7)
    layer, inputs = case[0](), case[1]()
    outputs = case[2](layer, *inputs)
    assert outputs.place == paddle.framework._current_expected_place(), f"it came out at {outputs.place}"
    (outputs.astype("float32") ** 2).mean().backward()
    parameters = layer.parameters() if isinstance(layer, nn.Layer) else []
    gradients = [x.grad for x in (*inputs, *parameters) if x.grad is not None]
    return [t.astype("float32").numpy() for t in (outputs, *gradients)]


def learned(optimizer: str) -> list[Any]:
    """The weights after 5 updates on the current device."""
    paddle.seed(3)
    np.random.seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 4))
    updating = OPTIMIZERS[optimizer](model.parameters())
    for _ in range(5):
        F.cross_entropy(model(normal(6, 8)), whole(6, below=4)).backward()
        updating.step()
        updating.clear_grad()
    return [parameter.numpy() for parameter in model.parameters()]


def noticed() -> list[bool]:
    """Of a draw from the current device's generator, and of one from the CPU's: is it in `random_state`? And has that
    nothing of the other devices, each of which takes 0.1 ms?"""
    states = [random_state()]
    for device in (paddle.get_device(), "cpu"):
        with on(device):
            paddle.rand([2])
        states.append(random_state())
    return [states[0] != states[1], states[1] != states[2], len(states[0]) <= 2]


def compared() -> dict[str, str]:
    """In a rank: how what the device gives differs from what the CPU gives; nothing is the answer hoped for."""
    device = paddle.device.get_available_custom_device()[0]
    found: dict[str, str] = {}
    jobs = {name: partial(given, case) for name, case in CASES.items()}
    jobs |= {f"5 steps of {name}": partial(learned, name) for name in OPTIMIZERS}
    jobs["random draws"] = noticed
    for name, job in jobs.items():
        try:
            paddle.set_device("cpu")
            wanted = job()
            paddle.set_device(device)
            got = job()
        except Exception as error:  # noqa: BLE001 - one that fails must not hide the others
            found[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
            continue
        if not all(np.array_equal(a, b) for a, b in zip(wanted, got, strict=True)):
            found[name] = (
                f"{max(float(np.abs(a - b).max()) for a, b in zip(wanted, got, strict=True)):.2e} apart"
            )
    return found


def test_operations_and_optimizers_give_the_same_bits_as_on_the_cpu() -> None:
    assert run_ranks(compared, 1) == [{}]
