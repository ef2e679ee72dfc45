"""Which of an optimizer's states are averaged as weights are, and which number by number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle

from paddle_dp.strategies._rounds.periods import LocalStates


class TwoRanks:
    """This rank, and another one whose numbers are larger by 2, with the same weight in means."""

    def gather(self, mine: Any) -> list[Any]:
        if mine and isinstance(mine[0], float):
            return [
                mine,
                [mine[0], {name: (np.array(value) + 2).tolist() for name, value in mine[1].items()}],
            ]
        return [mine, mine]


def test_what_has_not_a_parameter_s_shape_is_no_gradient_of_it() -> None:
    """ASGD keeps the gradients of several steps, [steps, …], and a number of steps, which is whole."""
    weight = paddle.create_parameter([3, 2], "float32")
    states = {
        "d": paddle.ones([3, 2]),
        "y": paddle.zeros([4, 3, 2]),
        "m": paddle.to_tensor([5]),
        "beta1_pow_acc": paddle.to_tensor([0.5]),
    }
    optimizer = SimpleNamespace(_accumulators={kind: {weight.name: state} for kind, state in states.items()})
    own = LocalStates(optimizer, [("weight", weight)], TwoRanks())  # type: ignore[arg-type]
    assert [[one is not None for one in kind] for kind in own.by_kind()] == [[True], [False], [False]]
    assert sorted(own.counts()) == ["weight/beta1_pow_acc", "weight/m", "weight/y"]
    own.average_counts(0.5)
    assert states["m"].tolist() == [6] and states["beta1_pow_acc"].tolist() == [1.5]
    np.testing.assert_array_equal(states["y"].numpy(), np.ones([4, 3, 2]))
    np.testing.assert_array_equal(states["d"].numpy(), np.ones([3, 2]))
