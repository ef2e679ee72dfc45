"""Which new values a forward waits for, and when; without processes."""

from __future__ import annotations

import copy
from typing import Any

import paddle
import pytest
from paddle import nn

from paddle_dp.axes.sharding import param_broadcast
from paddle_dp.axes.sharding.param_broadcast import AsyncParamBroadcast
from paddle_dp.core.data_group import CommGroups


class Group:
    ranks = (4, 6)


class Kept(nn.Layer):
    """A weight that its layer reads from a list, as recurrent layers do; and one that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.idle = self.create_parameter([2, 2]), self.create_parameter([2, 2])
        self.all_weights = [[self.weight]]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return x @ self.all_weights[0][0]


class Model(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.kept, self.last = nn.Linear(2, 2), Kept(), nn.Linear(2, 2, bias_attr=False)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.last(self.kept(self.first(x)))


class Case:
    """`sent`: the names of what was broadcast, in order, and by which group; `waited`: of what was waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.model: Any = Model()
        named = list(self.model.named_parameters())
        names = {id(parameter): name for name, parameter in named}
        self.sent: list[tuple[str, int, Any]] = []
        self.waited: list[str] = []
        self.groups: Any = [Group(), Group()]

        class Task:
            def __init__(self, name: str, waited: list[str]):
                self.wait = lambda: waited.append(name)

        def broadcast(tensor: paddle.Tensor, owner: int, group: Any, sync_op: bool) -> Task:
            assert not sync_op
            self.sent.append((names[id(tensor)], owner, group))
            return Task(names[id(tensor)], self.waited)

        monkeypatch.setattr(param_broadcast.dist, "broadcast", broadcast)
        owners = [Group.ranks[place % 2] for place in range(len(named))]
        self.values = AsyncParamBroadcast(self.model, [p for _, p in named], owners, CommGroups(self.groups))

    def step(self) -> None:
        self.values.begin()
        self.model(paddle.ones([1, 2]))
        self.values.share()
        self.waited.clear()


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    case = Case(monkeypatch)
    case.step()
    return case


def test_values_travel_in_the_order_of_the_model_each_owner_s_in_its_group(case: Case) -> None:
    a, b = case.groups
    names = ["first.weight", "first.bias", "kept.weight", "kept.idle", "last.weight"]
    assert case.sent == list(zip(names, [4, 6, 4, 6, 4], [a, b, a, b, a], strict=True))


def test_a_forward_begins_before_the_last_values_are_there(case: Case) -> None:
    case.values.begin()
    assert case.waited == ["kept.weight", "kept.idle"]  # from a list; and not read in the forward before
    case.model.first(paddle.ones([1, 2]))
    assert case.waited[2:] == ["first.weight", "first.bias"]
    case.model.last(paddle.ones([1, 2]))
    assert case.waited[4:] == ["last.weight"]
    case.model.last(paddle.ones([1, 2]))
    assert len(case.waited) == 5


def test_so_does_a_layer_that_reads_the_weight_of_another(case: Case) -> None:
    case.values.begin()
    paddle.matmul(paddle.ones([1, 2]), case.model.last.weight)
    assert "last.weight" in case.waited


def test_who_reads_the_model_waits_for_all(case: Case) -> None:
    all_of_them = sorted(name for name, *_ in case.sent)
    case.model.state_dict()
    assert sorted(case.waited) == all_of_them
    case.step()
    case.model.parameters()
    assert sorted(case.waited) == all_of_them
    case.step()
    case.values.settle()
    assert sorted(case.waited) == all_of_them


def test_what_was_read_between_updates_was_not_read_by_a_forward(case: Case) -> None:
    case.model.state_dict()
    case.values.begin()
    case.values.share()
    case.waited.clear()
    case.values.begin()
    assert len(case.waited) == 5


def test_a_copied_layer_waits_for_nothing(case: Case) -> None:
    other = copy.deepcopy(case.model)
    assert type(other.first._parameters) is dict
    case.step()
    other.state_dict()
    assert not case.waited
