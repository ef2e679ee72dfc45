"""Divergence is named; it is never silence."""

import io
from contextlib import redirect_stderr
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.core.consistency import Replica, _on_device, check_sound, digests
from paddle_dp.core.first_not_finite import not_finite
from paddle_dp.data import Loader
from paddle_dp.errors import DivergenceError, NotFiniteError
from paddle_dp.mesh import join
from paddle_dp.part import read_part
from paddle_dp.train import Callback
from tests.house.learners import task_of
from tests.house.training import untried
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


def test_a_weight_that_was_placed_and_never_drawn_is_named():
    with paddle.LazyGuard():
        layer = nn.Linear(2, 2)
    copies = [Replica(name, parameter) for name, parameter in layer.named_parameters()]
    with pytest.raises(NotFiniteError, match=r"start: 'weight' is not finite.*never given a value"):
        check_sound(copies, [], SimpleNamespace(ranks=1, gather=lambda value: [value]), "at the start")


class Branches(nn.Layer):
    """Uses `second` only where it is asked to."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.use = nn.Linear(4, 3), nn.Linear(4, 3), True

    def forward(self, x):
        return self.first(x) + self.second(x) if self.use else self.first(x)


def place(ranks_without, config, model=None):
    mesh = join(seed=1)
    model = model or Branches()
    model.use = mesh.rank not in ranks_without
    task = task_of(model)
    strategy = read_part("strategies", {"use": "data_parallel", **config})
    return mesh, strategy.build(mesh).place(task)


def batches_of(mesh):
    data = [(np.full([4], i / 8, "float32"), i % 3) for i in range(8)]
    return iter(Loader.plain(data, 4, mesh).read(0))


def step(mesh, learner):
    for batch in batches_of(mesh):
        learner.train_batch(batch)
        learner.check("after a step")


def stored(learner):
    """What lies here of the weight that is used or not; None where another rank stores it."""
    weight = learner.model.second.weight
    return weight.tolist() if learner.placed.is_stored(weight) else None


def unused(ranks_without, config):
    mesh, learner = place(ranks_without, config)
    try:
        step(mesh, learner)
    except DivergenceError as error:
        return str(error)
    return stored(learner)


def test_a_parameter_without_gradient_on_one_rank_is_an_error():
    for said in run_ranks(unused, 2, [1], {}):
        assert "parameter 'second.bias' got no gradient on rank 1" in said
        assert "strategy.find_unused_parameters=true" in said


def told_unused(config):
    """The weight that no rank uses, the one that all use, and what this rank said on standard error."""
    said = io.StringIO()
    with redirect_stderr(said):
        mesh, learner = place(range(8), config)
        step(mesh, learner)
    first = learner.model.first.weight
    return stored(learner), first.tolist() if learner.placed.is_stored(first) else None, said.getvalue()


ANY_NUMBER = {"use": "data_parallel"}
TOLD = [
    ANY_NUMBER,
    {"use": "data_parallel", "find_unused_parameters": True},
    {"use": "data_parallel", "compress": "bfloat16"},
    {"use": "hybrid", "data": 2},
    *({"use": "hybrid", "sharding": 2, "sharding_stage": stage} for stage in (1, 2, 3)),
    {"use": "local_sgd", "every": "2 steps"},
]


@pytest.fixture(scope="module")
def two():
    """What two ranks tell where nothing ends them."""
    return run_ranks(told_by_two, 2)


def told_by_two():
    return {
        "unused": [told_unused(config) for config in TOLD],
        "stages": told_by_stages(),
        "used": each_used(TOLD),
        "absent": unused_each(EVERYWHERE),
    }


def test_a_parameter_that_no_rank_uses_stays_as_it_is_and_is_told_once(two):
    """As the poolers of BERT and ERNIE, on one rank as on two."""
    alone, trained, said = run_ranks(told_unused, 1, ANY_NUMBER)[0]
    assert said.count("parameter 'second.weight' and 1 more got no gradient in update 1") == 1
    ranks = [rank["unused"] for rank in two]
    for number, config in enumerate(TOLD):
        assert [rank[number][2].count("got no gradient in update 1") for rank in ranks] == [1, 0], config
        for rank in ranks:
            left, moved, _ = rank[number]
            assert left is None or left == alone, config
            if moved is not None and not config.get("compress") and config["use"] != "local_sgd":
                np.testing.assert_allclose(moved, trained, rtol=1e-6, err_msg=str(config))


class Forgetful(nn.Linear):
    """Reads its weight, and not its bias."""

    def forward(self, x):
        return x @ self.weight


class Stages(nn.Sequential):
    """The second stage of two has a parameter that nothing reads."""

    def __init__(self):
        super().__init__(nn.Linear(4, 3), nn.Tanh(), Forgetful(3, 3), nn.Tanh())


def told_by_stages():
    said = io.StringIO()
    with redirect_stderr(said):
        step(*place([], {"use": "hybrid", "pipeline": 2}, Stages()))
    return said.getvalue()


def test_a_stage_s_parameter_that_is_not_used_is_told_by_the_first_rank(two):
    first, second = (rank["stages"] for rank in two)
    assert first.count("parameter '2.bias' got no gradient in update 1") == 1
    assert "no gradient" not in second


def test_where_all_are_used_nothing_is_told(two):
    for rank in two:
        assert len(rank["used"]) == len(TOLD)
        assert not any("no gradient" in text for text in rank["used"])


def each_used(configs):
    texts = []
    for config in configs:
        with redirect_stderr(io.StringIO()) as said:
            step(*place([], config))
        texts.append(said.getvalue())
    return texts


def test_paddles_reducer_cannot_leave_one_out():
    """It exchanges none of a bucket's gradients before it has all."""
    for said in run_ranks(unused, 2, [0, 1], {"exchange": "bucketed"}):
        assert "got no gradient on any rank, and paddle.DataParallel" in said
        assert "strategy.find_unused_parameters=true" in said


LATE = "parameter 'second.bias' got no gradient on rank {}, so it would not be exchanged"


def unused_later(ranks_without, config=None):
    """Every rank uses both branches in the first update, and from the second on only some do."""
    mesh, learner = place([], config or {})
    batches = batches_of(mesh)
    learner.train_batch(next(batches))
    learner.model.use = mesh.rank not in ranks_without
    try:
        learner.train_batch(next(batches))
    except DivergenceError as error:
        return str(error)
    learner.check("after a step")
    return stored(learner)


def test_a_parameter_without_gradient_from_the_second_update_on_is_named():
    for rank, said in enumerate(run_ranks(unused_later, 2, [0, 1])):
        assert LATE.format(rank) in said
        assert "strategy.find_unused_parameters=true" in said


def fails_on_one_rank():
    said = unused_later([1])
    raise AssertionError(said)


def test_on_one_rank_alone_it_ends_the_job_with_that_rank_s_sentence():
    """The other rank waits in its backward, and is ended with the job."""
    with pytest.raises(AssertionError, match=LATE.format(1)):
        run_ranks(fails_on_one_rank, 2, timeout=60)


def steps():
    untried()

    class Leave(Callback):
        def step(self, moment):
            model.use = moment.progress.step < 2

    model = Branches()
    data = [(np.full([4], i / 8, "float32"), np.int64(i % 3)) for i in range(16)]
    optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    trainer = Trainer.of(
        model=model, loss="cross_entropy", optimizer=optimizer, train=data, batch=4, callbacks=[],
    )  # fmt: skip
    trainer.add(Leave())
    try:
        trainer.fit("4 steps")
    except DivergenceError as error:
        return str(error)


def test_the_step_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for rank, said in enumerate(run_ranks(steps, 2)):
        assert said.startswith("step 3: " + LATE.format(rank))


EVERYWHERE = [
    {"use": "data_parallel", "find_unused_parameters": True},
    *(
        {"use": "hybrid", **axes}
        for axes in ({"data": 2}, {"sharding": 2}, {"sharding": 2, "sharding_stage": 2})
    ),
    {"use": "hybrid", "sharding": 2, "sharding_stage": 3},
]


def unused_each(configs):
    return [
        [unused(without, config), unused_later(without, config)]
        for config in configs
        for without in ([1], [0, 1])
    ]


def test_where_gradients_may_be_absent_a_rank_without_one_goes_on(two):
    """In the first update, and from the second on; on one rank, and on all."""
    ranks = [rank["absent"] for rank in two]
    for found in ranks:
        for number, weights in enumerate(found):
            for weight, first in zip(weights, ranks[0][number % 2], strict=True):
                if weight is not None:
                    np.testing.assert_allclose(weight, first, rtol=1e-6, err_msg=str(number))


def diverge():
    mesh, learner = place([], {})
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
