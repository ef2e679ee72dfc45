"""What tests of models share: tokens, and what every language model has to be."""

import numpy as np
import paddle
import pytest


@pytest.fixture
def tokens():
    """Random tokens int64 [2, length] of 0..19."""

    def draw(length: int):
        return paddle.to_tensor(np.random.default_rng(0).integers(0, 20, (2, length)))

    return draw


@pytest.fixture
def every_parameter_learns():
    """Fails where a parameter of the model has no gradient after a backward of its outputs."""

    def check(model, inputs):
        outputs = model(inputs)
        (outputs * paddle.randn(outputs.shape)).sum().backward()
        idle = [n for n, p in model.named_parameters() if p.grad is None or not float(p.grad.abs().sum()) > 0]
        assert not idle, f"these do not learn: {idle}"

    return check
