"""Optimizer states that are offloaded between updates come back as they were."""

import numpy as np
import paddle

from paddle_dp.axes.sharding.zero import Offload
from paddle_dp.learner.memory import size, states


def learn(away: bool) -> list[np.ndarray]:
    paddle.seed(0)
    model = paddle.nn.Linear(4, 3)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
    offload = Offload(optimizer)
    for step in range(4):
        model(paddle.full([2, 4], step + 1.0)).square().sum().backward()
        if away:
            offload.to_device()
        optimizer.step()
        if away:
            offload.to_host()
            offload.to_host()  # a second time does nothing
            assert size(states(optimizer)) == 0
        optimizer.clear_grad()
    offload.to_device()
    # Two moments, and two powers a parameter.
    assert size(states(optimizer)) == 2 * 4 * (4 * 3 + 3) + 2 * 2 * 4
    return [p.numpy() for p in model.parameters()] + [t.numpy() for t in states(optimizer)]


def test_an_update_is_bitwise_the_same() -> None:
    for here, away in zip(learn(False), learn(True), strict=True):
        np.testing.assert_array_equal(here, away)
