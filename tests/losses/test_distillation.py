"""Distillation against its formula, of one target a sample and of several."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_dp.losses.distillation import Config


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


@pytest.mark.parametrize("shape", [(5,), (5, 7), (5, 3, 2)])
def test_both_terms_are_means_over_the_targets_of_a_sample(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    student, teacher = random.normal(0, 2, (2, *shape, 4))
    targets = random.integers(0, 4, shape)
    loss = Config(temperature=2.0, weight=0.3).build()
    total, count = loss((paddle.to_tensor(student), paddle.to_tensor(teacher)), paddle.to_tensor(targets))
    hard = -np.take_along_axis(log_softmax(student), targets[..., None], -1)
    soft, goal = (log_softmax(scores / 2.0) for scores in (student, teacher))
    wanted = 0.7 * hard.mean() + 0.3 * 4.0 * (np.exp(goal) * (goal - soft)).sum(-1).mean()
    assert total.item() / count == pytest.approx(wanted, rel=1e-12) and count == 5


def test_a_student_that_is_its_teacher_has_the_other_term_alone() -> None:
    scores, targets = paddle.randn([4, 6, 3]), paddle.zeros([4, 6], "int64")
    loss = Config(weight=0.5).build()
    assert loss((scores, scores), targets)[0].item() == pytest.approx(
        loss(scores, targets)[0].item() / 2, 1e-6
    )
