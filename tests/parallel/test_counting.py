"""A loss says what it is over, or is refused."""

import paddle
import pytest
from paddle import nn

from paddle_dp.errors import LossError
from paddle_dp.parallel.counting import total_and_count


def test_a_pair_is_taken_as_it_is():
    total, count = total_and_count((paddle.to_tensor(6.0), 3), 3, counts=False)
    assert (total.item(), count) == (6.0, 3)


def test_one_loss_per_sample_is_added_up():
    loss = nn.CrossEntropyLoss(reduction="none")(paddle.zeros([5, 2]), paddle.zeros([5], "int64"))
    total, count = total_and_count(loss, 5, counts=False)
    assert count == 5
    assert total.item() == pytest.approx(5 * 0.6931472)


def test_a_bare_mean_is_refused_because_it_does_not_say_over_what():
    with pytest.raises(LossError, match="reduction='none'"):
        total_and_count(paddle.to_tensor(1.0), 4, counts=False)


def test_another_count_than_samples_needs_a_count_method():
    with pytest.raises(LossError, match=r"12 things in 4 samples\. Give it a method count"):
        total_and_count((paddle.to_tensor(1.0), 12), 4, counts=False)
    assert total_and_count((paddle.to_tensor(1.0), 12), 4, counts=True)[1] == 12
