"""Divergence is named; it is never silence."""

import paddle
import pytest
from paddle import nn

from paddle_dp.parallel.consistency import _on_device, digests
from paddle_dp.parallel.finite import not_finite
from tests.ranks import run_ranks


def digest(x):
    """Both ways: of the memory, and by sums on the device."""
    return (*digests([x])[0], *_on_device(x.detach()).tolist())


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "int32", "bool"])
def test_equal_bits_equal_digests(dtype):
    x = paddle.to_tensor([[1, 0, 3], [4, 5, 6]]).astype(dtype)
    assert digest(x) == digest(x.clone())


def test_parts_and_turned_tensors_have_the_digest_of_their_own_numbers():
    x = paddle.randn([300, 64])
    for part in (x[7:290], x[:, 3:50], x.transpose([1, 0])):
        assert digests([part]) == digests([part.clone()]) == digests([paddle.to_tensor(part.numpy())])


@pytest.mark.parametrize("size", [5, 10_000])  # bytes that are left over, and whole rows of lanes
def test_one_changed_bit_and_two_swapped_elements_show(size):
    x = paddle.arange(size, dtype="float32")
    changed, swapped = x.clone(), x.clone()
    changed[3] = 3.0000002
    swapped[2], swapped[4] = 4.0, 2.0
    for found in zip(*map(digests, ([x], [changed], [swapped])), strict=True):
        assert len(set(found)) == 3
    assert len({tuple(_on_device(t).tolist()) for t in (x, changed, swapped)}) == 3
    assert digest(paddle.to_tensor([0.0])) != digest(paddle.to_tensor([-0.0]))


def test_rows_that_change_places_show():
    x = paddle.randn([64, 2048])
    assert digests([x]) != digests([paddle.concat([x[1:2], x[:1], x[2:]])])


def test_an_empty_tensor_has_a_digest():
    assert digest(paddle.zeros([0, 3])) == (0, 0, 0, 0)


def test_what_is_not_finite_is_counted_and_named():
    good, large = paddle.ones([4]), paddle.full([4], 3e38)  # the squares overflow
    bad = paddle.to_tensor([1.0, float("nan"), float("inf"), float("-inf")])
    named = {"good": good, "large": large, "empty": paddle.zeros([0]), "whole": paddle.arange(3), "bad": bad}
    assert not_finite(named.items()) == {"bad": "1 NaN, 2 inf of 4"}
    for dtype in ("float64", "float16", "bfloat16"):
        assert not_finite([("bad", bad.astype(dtype))]) == {"bad": "1 NaN, 2 inf of 4"}


class Branches(nn.Layer):
    """Uses `second` only where it is asked to."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.use = nn.Linear(4, 3), nn.Linear(4, 3), True

    def forward(self, x):
        return self.first(x) + self.second(x) if self.use else self.first(x)


def place(ranks_without, find_unused_parameters):
    from paddle_dp.losses.cross_entropy import Config as CrossEntropy
    from paddle_dp.mesh import join
    from paddle_dp.parallel import Task
    from paddle_dp.strategies import data_parallel, hybrid

    mesh = join(seed=1)
    model = Branches()
    model.use = mesh.rank not in ranks_without
    task = Task(
        model=model,
        loss=CrossEntropy().build(),
        optimizer=lambda rate, named: paddle.optimizer.SGD(0.1, parameters=[p for _, p in named]),
    )
    if isinstance(find_unused_parameters, dict):  # the degrees of a hybrid layout, which has no such setting
        config = hybrid.Config(**find_unused_parameters)
    else:
        config = data_parallel.Config(find_unused_parameters=find_unused_parameters)
    return mesh, config.build(mesh).place(task)


def step(mesh, learner):
    from paddle_dp.data import Loader

    class Data:
        def __len__(self):
            return 8

        def __getitem__(self, i):
            import numpy as np

            return np.full([4], i / 8, "float32"), i % 3

    for batch in Loader.plain(Data(), 4, mesh).read(0):
        learner.train_batch(batch)
        learner.check("after a step")


def unused(ranks_without, find_unused_parameters):
    from paddle_dp.errors import DivergenceError

    mesh, learner = place(ranks_without, find_unused_parameters)
    try:
        step(mesh, learner)
    except DivergenceError as error:
        return str(error)
    return learner.model.second.weight.tolist()


def test_a_parameter_without_gradient_on_one_rank_is_an_error():
    for said in run_ranks(unused, 2, [1], False):
        assert "parameter 'second.bias' got no gradient on rank 1" in said
        assert "strategy.find_unused_parameters=true" in said


def test_a_parameter_without_gradient_anywhere_is_an_error_too():
    """Its whole bucket would not be exchanged."""
    for said in run_ranks(unused, 2, [0, 1], False):
        assert "got no gradient on any rank" in said


@pytest.mark.parametrize(
    ("degrees", "without", "who"),
    [
        ({"data": 2}, [1], "rank 1"),
        ({"sharding": 2}, [1], "rank 1"),
        ({"sharding": 2, "sharding_stage": 2}, [0, 1], "any rank"),
    ],
)
def test_a_hybrid_layout_is_not_told_to_set_what_it_has_not(degrees, without, who):
    for said in run_ranks(unused, 2, without, degrees):
        assert f"parameter 'second.bias' got no gradient on {who}" in said
        assert "Set strategy.find_unused_parameters" not in said
        assert "Freeze the parameter (stop_gradient), or use it on every rank" in said
        assert "strategy.use=data_parallel" in said


@pytest.mark.parametrize("without", [[1], [0, 1]])
def test_find_unused_handles_both(without):
    weights = run_ranks(unused, 2, without, True)
    assert isinstance(weights[0], list)
    assert weights[0] == weights[1]


def diverge():
    from paddle_dp.errors import DivergenceError

    mesh, learner = place([], False)
    if mesh.rank == 2:
        with paddle.no_grad():
            learner.model.second.weight[1, 2] = 0.25
    try:
        learner.check("after step 7")
    except DivergenceError as error:
        return str(error)


def test_a_changed_weight_is_named_with_its_rank():
    for said in run_ranks(diverge, 3):
        assert said.startswith("after step 7: rank 2 holds other values than rank 0 in 'second.weight'.")


def test_a_tensor_without_memory_has_an_empty_digest():
    """Each of Paddle's recurrent layers holds one on a CPU."""
    state = dict(paddle.nn.LSTM(2, 3).named_buffers())["_dropout_state"]
    assert not state._is_initialized()
    ones = paddle.ones([3])
    assert digests([state, ones]) == [(0, 0), *digests([ones])]
