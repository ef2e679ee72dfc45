import numpy as np
import paddle
import pytest

from paddle_dp.strategies._rounds.periodic_means import OuterMomentum


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_paddle_s_momentum(nesterov):
    """paddle.optimizer.Momentum is the same formula; its rate is a float32, so it is an exact one here."""
    weight = paddle.create_parameter([3], "float64")
    weight.set_value(paddle.to_tensor([1.0, -2.0, 0.5], "float64"))
    momentum = paddle.optimizer.Momentum(0.75, 0.875, [weight], use_nesterov=nesterov)
    outer = OuterMomentum(learning_rate=0.75, momentum=0.875, nesterov=nesterov)
    ours = weight.detach().clone()
    outer.begin([ours])
    for step in range(4):
        gradient = paddle.to_tensor([0.1 * step, -0.3, 1.0 / (step + 1)], "float64")
        ours.subtract_(outer.step(0, gradient))
        weight.grad = gradient
        momentum.step()
        np.testing.assert_allclose(ours.numpy(), weight.numpy(), rtol=1e-14)


def test_without_momentum_and_with_rate_1_it_is_the_plain_mean():
    outer = OuterMomentum(learning_rate=1.0, momentum=0.0, nesterov=False)
    outer.begin([paddle.zeros([2])])
    for values in ([0.5, -1.0], [0.25, 3.0]):
        assert outer.step(0, paddle.to_tensor(values)).tolist() == values
