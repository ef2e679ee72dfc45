from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_dp.checkpoint import Snapshot, load, load_optimizer, optimizer_tensors, save, tensor_shard
from paddle_dp.errors import CheckpointError
from paddle_dp.mesh import Mesh

MADE = {
    "sgd": lambda lr, p: paddle.optimizer.SGD(lr, parameters=p),
    "momentum": lambda lr, p: paddle.optimizer.Momentum(lr, parameters=p, use_nesterov=True),
    "adamw": lambda lr, p: paddle.optimizer.AdamW(
        lr, parameters=p, grad_clip=paddle.nn.ClipGradByGlobalNorm(0.1)
    ),
    "adam_amsgrad": lambda lr, p: paddle.optimizer.Adam(lr, parameters=p, amsgrad=True),
    "lamb": lambda lr, p: paddle.optimizer.Lamb(lr, parameters=p),
}


class Net(paddle.nn.Layer):
    """Two layers, of which the second takes part only when it is asked to."""

    def __init__(self):
        super().__init__()
        self.first, self.second = paddle.nn.Linear(3, 4), paddle.nn.Linear(4, 4)

    def forward(self, x, deep=True):
        x = paddle.tanh(self.first(x))
        return self.second(x) if deep else x


def _net_and_optimizer(made):
    net = Net()
    schedule = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1.0 / (1 + step))
    return net, made(schedule, net.parameters())


def _train(net, optimizer, steps, deep=True):
    for step in steps:
        x = paddle.to_tensor(np.random.default_rng(step).standard_normal((5, 3)).astype("float32"))
        net(x, deep).square().mean().backward()
        optimizer.step()
        optimizer.clear_grad()
        optimizer._learning_rate.step()


def _carry_over(net, optimizer, made, folder):
    """A fresh net and optimizer, in the middle of a process that made others before, with the state of these."""
    kept = {
        name: tensor_shard(name, tensor)
        for name, tensor in optimizer_tensors(optimizer, net.named_parameters()).items()
    }
    opened = load(save(Snapshot(tensors=kept, state={"progress": {"step": 1}}), folder, Mesh.alone()))
    twin, other = _net_and_optimizer(made)
    twin.set_state_dict(net.state_dict())
    other._learning_rate.set_state_dict(optimizer._learning_rate.state_dict())
    load_optimizer(other, twin.named_parameters(), lambda name, tensor: opened.read(name), opened.names)
    return twin, other


def _assert_equal(net, optimizer, twin, other):
    mine = optimizer_tensors(optimizer, net.named_parameters())
    its = optimizer_tensors(other, twin.named_parameters())
    assert mine.keys() == its.keys()
    for (name, a), (_, b) in [*zip(net.named_parameters(), twin.named_parameters(), strict=True)]:
        np.testing.assert_array_equal(a.numpy(), b.numpy(), name)
    for name in mine:
        np.testing.assert_array_equal(mine[name].numpy(), its[name].numpy(), name)


@pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())
@pytest.mark.parametrize(("before", "deep"), [(0, True), (1, True), (3, True), (2, False)])
def test_after_a_load_the_next_steps_are_bitwise_the_same(tmp_path, made, before, deep):
    """Not `deep`: a parameter gets its first gradient after the load. `set_state_dict` fails there: "Optimizer set
    error, linear_1.w_0_moment1_0 should in state dict"."""
    net, optimizer = _net_and_optimizer(made)
    _train(net, optimizer, range(before), deep)
    names = optimizer_tensors(optimizer, net.named_parameters())
    assert deep or not any("second" in name for name in names)
    twin, other = _carry_over(net, optimizer, made, tmp_path)
    _assert_equal(net, optimizer, twin, other)
    for pair in ((net, optimizer), (twin, other)):
        _train(*pair, range(before, before + 2))
    _assert_equal(net, optimizer, twin, other)


def test_a_second_load_into_a_running_optimizer(tmp_path):
    """Going back to the best checkpoint within one process."""
    net, optimizer = _net_and_optimizer(MADE["adamw"])
    _train(net, optimizer, range(2))
    twin, other = _carry_over(net, optimizer, MADE["adamw"], tmp_path)
    _train(twin, other, range(5))
    live = optimizer_tensors(optimizer, net.named_parameters())
    load_optimizer(other, twin.named_parameters(), lambda name, tensor: live[name].numpy(), list(live))
    twin.set_state_dict(net.state_dict())
    _assert_equal(net, optimizer, twin, other)


@pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())
def test_a_second_load_from_before_a_parameters_first_gradient(tmp_path, made):
    """Its states are gone again, and the next steps are those of a training that had never made them."""
    net, optimizer = _net_and_optimizer(made)
    _train(net, optimizer, range(2), deep=False)
    twin, other = _carry_over(net, optimizer, made, tmp_path)
    _train(twin, other, range(5))
    live = optimizer_tensors(optimizer, net.named_parameters())
    load_optimizer(other, twin.named_parameters(), lambda name, tensor: live[name].numpy(), list(live))
    twin.set_state_dict(net.state_dict())
    _assert_equal(net, optimizer, twin, other)
    other._learning_rate.set_state_dict(optimizer._learning_rate.state_dict())
    for pair in ((net, optimizer), (twin, other)):
        _train(*pair, range(2, 4))
    _assert_equal(net, optimizer, twin, other)


def test_names_do_not_depend_on_the_process():
    for _ in range(2):  # Paddle calls the second net's parameters otherwise
        net, optimizer = _net_and_optimizer(MADE["adamw"])
        assert optimizer_tensors(optimizer, net.named_parameters()) == {}
        _train(net, optimizer, range(1))
        assert sorted(optimizer_tensors(optimizer, net.named_parameters())) == sorted(
            f"optimizer/{layer}.{parameter}/{accumulator}"
            for layer in ("first", "second")
            for parameter in ("weight", "bias")
            for accumulator in ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
        )


def test_two_optimizers_over_the_same_parameters_get_the_same_names():
    """Paddle's counter makes it linear_0.w_0_velocity_1 in the second one."""
    net = Net()
    for _ in range(2):
        optimizer = MADE["momentum"](paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1.0), net.parameters())
        _train(net, optimizer, range(1))
        names = optimizer_tensors(optimizer, net.named_parameters())
        assert "optimizer/first.weight/velocity" in names and len(names) == 4


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    net, optimizer = _net_and_optimizer(MADE["momentum"])
    _train(net, optimizer, range(1))
    with pytest.raises(CheckpointError, match="velocity, which SGD does not keep"):
        _carry_over(net, optimizer, MADE["sgd"], tmp_path)
    with pytest.raises(CheckpointError, match="velocity, which AdamW does not keep"):
        _carry_over(net, optimizer, MADE["adamw"], tmp_path)


@pytest.mark.parametrize(("saved_dtype", "dtype"), [("float64", "float32"), ("float32", "float64")])
def test_a_state_of_float64_goes_on_in_float32_and_the_reverse(saved_dtype, dtype):
    net, optimizer = _net_and_optimizer(MADE["adamw"])
    _train(net, optimizer, range(1))
    live = optimizer_tensors(optimizer, net.named_parameters())
    arrays = {name: (tensor.numpy() / 3).astype(saved_dtype) for name, tensor in live.items()}
    twin, other = _net_and_optimizer(MADE["adamw"])
    twin.to(dtype=dtype)
    load_optimizer(other, twin.named_parameters(), lambda name, tensor: arrays[name], list(arrays))
    for name, tensor in optimizer_tensors(other, twin.named_parameters()).items():
        here = arrays[name].astype(str(tensor.dtype).removeprefix("paddle."))
        np.testing.assert_array_equal(tensor.numpy(), here, name)


def test_another_shape_is_refused_and_a_parameter_that_the_model_does_not_name():
    net, optimizer = _net_and_optimizer(MADE["momentum"])
    _train(net, optimizer, range(1))
    names = list(optimizer_tensors(optimizer, net.named_parameters()))
    with pytest.raises(CheckpointError, match=r"velocity is float32 \[1\] in the checkpoint"):
        load_optimizer(optimizer, net.named_parameters(), lambda name, tensor: np.zeros(1, "f4"), names)
    with pytest.raises(CheckpointError, match="belongs to none of the model's parameters"):
        optimizer_tensors(optimizer, list(net.named_parameters())[:2])


class Weight(paddle.nn.Layer):
    """One bfloat16 parameter: of Paddle's optimizers only SGD has a CPU kernel for it."""

    def __init__(self):
        super().__init__()
        self.w = self.create_parameter([3, 2])
        self.to(dtype="bfloat16")


def _low_precision_step(layer, optimizer):
    (layer.w * layer.w).astype("float32").sum().backward()
    optimizer.step()
    optimizer.clear_grad()


def test_the_master_weight_of_a_bfloat16_parameter_goes_on_bitwise():
    layer, twin = Weight(), Weight()
    mine, its = (
        paddle.optimizer.SGD(1e-3, parameters=n.parameters(), multi_precision=True) for n in (layer, twin)
    )
    for _ in range(3):
        _low_precision_step(layer, mine)
    live = optimizer_tensors(mine, layer.named_parameters())
    assert (
        list(live) == ["optimizer/w/master_weight"]
        and live["optimizer/w/master_weight"].dtype == paddle.float32
    )
    twin.w.set_value(layer.w.numpy())
    load_optimizer(its, twin.named_parameters(), lambda name, tensor: live[name].numpy(), list(live))
    for _ in range(3):
        _low_precision_step(layer, mine)
        _low_precision_step(twin, its)
    np.testing.assert_array_equal(layer.w.numpy(), twin.w.numpy())
    there = optimizer_tensors(its, twin.named_parameters())["optimizer/w/master_weight"]
    np.testing.assert_array_equal(live["optimizer/w/master_weight"].numpy(), there.numpy())


@pytest.mark.parametrize("kind", ["Momentum", "AdamW", "Lamb"])
def test_accumulators_of_a_master_weight_carry_the_parameters_name(kind):
    """Their step has no CPU kernel for bfloat16; what is made before it, has."""
    layer = Weight()
    optimizer = getattr(paddle.optimizer, kind)(0.1, parameters=layer.parameters(), multi_precision=True)
    accumulators = (
        ["velocity"] if kind == "Momentum" else ["moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc"]
    )
    values = {f"optimizer/w/{a}": np.full([1] if "pow" in a else [3, 2], 7, "f4") for a in accumulators}
    values["optimizer/w/master_weight"] = np.full([3, 2], 8, "f4")
    load_optimizer(optimizer, layer.named_parameters(), lambda name, tensor: values[name], list(values))
    tensors = optimizer_tensors(optimizer, layer.named_parameters())
    assert {name: tensor.numpy().max() for name, tensor in tensors.items()} == {
        name: array.max() for name, array in values.items()
    }
