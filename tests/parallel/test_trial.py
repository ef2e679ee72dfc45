"""A trial leaves nothing behind, wherever a model or a loss keeps what it remembers."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import paddle
from paddle import nn

from paddle_dp.parallel.trial import restored


class Queue:
    """An object of the user's own."""

    def __init__(self) -> None:
        self.at, self.kept = 0, [np.zeros(2)]


class Remembers(nn.Layer):
    """Writes into everything that it holds, its trained weight and a layer made on the way among it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.history, self.counts, self.queue = [], {"calls": [0]}, Queue()
        self.last, self.seen, self.inside = deque(maxlen=2), set(), (paddle.zeros([2]),)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.history.append(x)
        self.counts["calls"][0] += 1
        self.queue.at += 1
        self.queue.kept[0] += 1
        self.last.append(1)
        self.seen.add(len(self.history))
        if not hasattr(self, "late"):
            self.late = nn.Linear(2, 2)
        with paddle.no_grad():
            self.inside[0].add_(paddle.ones([2]))
            self.linear.weight.set_value(self.linear.weight * 0.9)
        return self.late(self.linear(x))


def held(model: Remembers) -> list[Any]:
    return [
        len(model.history), model.counts["calls"][0], model.queue.at, model.queue.kept[0].tolist(), list(model.last),
        {*model.seen}, model.inside[0].tolist(), model.linear.weight.tolist(), sorted(model._sub_layers),
    ]  # fmt: skip


def test_what_a_model_holds_is_put_back() -> None:
    model, x = Remembers(), paddle.ones([1, 2])
    before = held(model)
    with restored(model), paddle.no_grad():
        model(x)
        assert all(now != then for now, then in zip(held(model), before, strict=True))
    assert held(model) == before
    assert model.last.maxlen == 2


def test_what_a_function_holds_is_put_back() -> None:
    history: list[int] = []
    calls = 0

    def loss() -> None:
        nonlocal calls
        calls += 1
        history.append(calls)

    with restored(loss):
        loss()
        assert (calls, history) == (1, [1])
    assert (calls, history) == (0, [])
