"""An optimizer that takes norms over parameters does not update slices of them; one that nobody knows is named."""

from __future__ import annotations

from typing import Any, ClassVar

import paddle
import pytest
from paddle import nn
from paddle.incubate.optimizer import LarsMomentumOptimizer

from paddle_dp.core.optimizer import check_by_parameter, check_elementwise, check_not_wrapper
from paddle_dp.errors import UsageError
from tests.ranks import run_ranks


class Own(paddle.optimizer.SGD):
    """An optimizer of the user's own: its `step` may do anything."""


class OwnLamb(paddle.optimizer.Lamb):
    pass


class Cut(nn.Layer):
    cuts: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(paddle.tanh(self.up(x)))


ELEMENTWISE = [
    "SGD", "Momentum", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSProp", "ASGD", "Rprop",
]  # fmt: skip


def weights() -> list[paddle.Tensor]:
    return nn.Linear(2, 2).parameters()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_paddles_own_that_compute_element_by_element(name: str) -> None:
    assert check_elementwise(getattr(paddle.optimizer, name)(0.1, parameters=weights()), 2) == []


@pytest.mark.parametrize(
    "kind", [paddle.optimizer.Lamb, OwnLamb, LarsMomentumOptimizer, paddle.optimizer.LBFGS]
)
def test_what_needs_whole_parameters_is_refused_where_they_are_cut(kind: Any) -> None:
    optimizer = object.__new__(kind)  # LARS is made in static graphs only
    with pytest.raises(
        UsageError, match=rf"strategy.tensor=2: optimizer {kind.__name__} .*strategy.tensor=1"
    ):
        check_elementwise(optimizer, 2)
    assert check_elementwise(optimizer, 1) == []


def placed() -> list[Any]:
    """In two ranks that cut the model: what is said of Lamb, finished and not, and the differences of two others."""
    from paddle_dp.learner import Task
    from paddle_dp.losses.cross_entropy import Config as CrossEntropy
    from paddle_dp.mesh import join
    from paddle_dp.strategies.hybrid import Config

    strategy = Config(tensor=2, data=1).build(join(seed=1))

    def place(kind: Any, finished: bool = True) -> Any:
        model = Cut()
        optimizer = lambda rate, named: kind(0.1, parameters=[p for _, p in named])  # noqa: E731
        task = Task(
            model=model,
            loss=CrossEntropy().build(),
            optimizer=kind(0.1, parameters=model.parameters()) if finished else optimizer,
        )
        try:
            return strategy.place(task).differences()
        except UsageError as error:
            return str(error)

    lamb = paddle.optimizer.Lamb
    return [place(lamb), place(lamb, finished=False), place(Own), place(paddle.optimizer.SGD)]


def test_where_a_model_is_cut_it_is_asked() -> None:
    for finished, made, own, sgd in run_ranks(placed, 2):
        assert finished == made and "optimizer Lamb takes norms over whole parameters" in finished
        (said,) = own
        assert said.startswith("optimizer Own: whether it computes element by element is not known")
        assert sgd == []


def test_an_own_optimizer_that_updates_some_parameters_only_is_named() -> None:
    own = Own(0.1, parameters=weights())
    for axis in ("sharding", "pipeline"):
        (said,) = check_by_parameter(own, **{"sharding": 1, "pipeline": 1, axis: 2})
        assert said.startswith("optimizer Own: whether an update of a parameter looks at other parameters")
        assert f"strategy.{axis} each rank updates some of them" in said
    assert check_by_parameter(own, sharding=1, pipeline=1) == []
    for known in (paddle.optimizer.Lamb, paddle.optimizer.AdamW):
        assert check_by_parameter(known(0.1, parameters=weights()), sharding=2) == []


def test_what_computes_the_loss_again_within_an_update_is_refused() -> None:
    with pytest.raises(UsageError, match="LBFGS computes the loss several times in one update"):
        check_not_wrapper(paddle.optimizer.LBFGS(0.1, parameters=weights()))
