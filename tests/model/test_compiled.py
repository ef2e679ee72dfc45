"""A compiled forward learns what the layers learn, and what cannot be compiled is refused with what to do."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from models import gpt, mlp
from paddle_dp.core.batch_norm import synchronize
from paddle_dp.errors import UsageError
from paddle_dp.export.program import load, write
from paddle_dp.learner import Task, full_model_learner
from paddle_dp.losses.mean_squared_error import MeanSquaredError
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.model.compiled import check_compiles, compiled, is_compiled, layer_by_layer
from paddle_dp.plan.layout import Layout
from paddle_dp.recipe import Precision
from paddle_dp.strategies.data_parallel import Config as DataParallel
from paddle_dp.units import Recompute
from tests.parity import assert_same, train, truth
from tests.ranks import run_ranks

MODELS = {
    "gpt": (lambda: gpt.Config(width=32, depth=1, heads=2, length=8).build(), lambda: paddle.randint(0, 256, [3, 8])),
    "mlp": (lambda: mlp.Config().build(), lambda: paddle.randn([5, 64])),
    "norms": (
        lambda: nn.Sequential(nn.Conv2D(3, 4, 3), nn.BatchNorm2D(4), nn.Flatten(), nn.Linear(16, 2)),
        lambda: paddle.randn([5, 3, 4, 4]),
    ),
}  # fmt: skip


def learned(model: nn.Layer, inputs: paddle.Tensor) -> dict[str, paddle.Tensor]:
    """Outputs, gradients and running statistics of a training step and an evaluation."""
    out = model(inputs)
    (out * out.detach().cos()).sum().backward()
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if not p.stop_gradient}
    model.eval()
    with paddle.no_grad():
        scores = model(inputs)
    model.train()
    return {"out": out, "scores": scores, **found, **dict(model.named_buffers())}


@pytest.mark.parametrize("name", MODELS)
def test_a_program_gives_what_the_layers_give(name: str) -> None:
    build, inputs = MODELS[name]
    paddle.seed(0)
    plain, batch = build(), inputs()
    program = copy.deepcopy(plain)
    compiled(program, inputs)
    assert is_compiled(program) and not is_compiled(plain)
    # Before the first gradient: Paddle's own to_static would never learn after that.
    for model in (plain, program):
        with paddle.no_grad():
            model(batch)
    expected, found = learned(plain, batch), learned(program, batch)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert float((found[key] - value).abs().max()) <= 1e-5 * max(float(value.abs().max()), 1e-3), key


class Counting(nn.Layer):
    """Divides by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        return self.layer(x) / self.calls


class CountingInfinite(Counting):
    """The same, beside a number that is infinite: every difference is below a share of it."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        return self.layer(x) / self.calls + paddle.to_tensor([float("-inf"), 0.0, 0.0, 0.0])


class Looping(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        done = 0
        while x.abs().max() > 1e-2 and done < 3:
            x = paddle.tanh(self.layer(x)) * 0.5
            done += 1
        return x


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Counting, "a second time"),
        (CountingInfinite, "a second time"),
        (Looping, "no gradient to layer.weight"),
    ],
)
def test_a_program_that_does_not_do_what_the_layers_do_is_refused(model: type[nn.Layer], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        compiled(model(), lambda: paddle.randn([6, 4]))


def test_hooks_are_called_layer_by_layer_only() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4)), []
    compiled(model, lambda: paddle.randn([2, 4]))
    model[0].register_forward_post_hook(lambda *_: seen.append(1))
    model(paddle.randn([2, 4]))
    assert not seen
    with layer_by_layer(model):
        model(paddle.randn([2, 4]))
    assert seen and is_compiled(model)


def test_it_is_exported_as_its_layers(tmp_path) -> None:
    model, inputs = nn.Sequential(nn.Linear(4, 4)), paddle.randn([2, 4])
    compiled(model, lambda: inputs)
    model.eval()
    write(model, [inputs.numpy()], tmp_path)
    assert np.allclose(load(tmp_path)(inputs.numpy())[0], model(inputs).numpy(), atol=1e-6) and is_compiled(
        model
    )


def test_copies_are_programs_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    compiled(model, None)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin[0].weight.set_value(paddle.zeros([4, 4]))
        twin[0].bias.set_value(paddle.ones([4]))
        assert is_compiled(twin) and float((twin(paddle.randn([2, 4])) - 1).abs().max()) == 0
    assert float(model(paddle.ones([2, 4])).std()) > 0


class Untraceable(nn.Layer):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return F.relu(paddle.to_tensor(np.sort(np.asarray(x))))


def test_what_cannot_be_traced_is_refused_with_its_cause() -> None:
    with pytest.raises(UsageError, match=r"cannot trace Untraceable: \w+: .*train\.compile=false"):
        compiled(Untraceable(), lambda: paddle.randn([2, 4]))
    with pytest.raises(UsageError, match=r"emulated by hooks.*float32"):
        compiled(nn.Linear(4, 4), None, emulated=True)


def test_a_new_shape_leaves_the_gradients_of_earlier_micro_batches() -> None:
    """A trace emptied them: an update from micro-batches of 24 and 25 samples learned from the last one alone."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    parts = [paddle.randn([n, 4]) for n in (3, 5)]
    for part in parts:
        model(part).sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.clear_gradients()
    compiled(model, None)
    for part in parts:
        model(part).sum().backward()
    for gradient, p in zip(wanted, model.parameters(), strict=True):
        np.testing.assert_allclose(p.grad.numpy(), gradient.numpy(), rtol=1e-6)


def test_samples_are_traced_in_the_precision_of_the_model(tmp_path) -> None:
    """A proof's float64 steps were refused: the model was float64, and what it was traced with was not."""
    task = Task(
        model=nn.Linear(4, 4), loss=MeanSquaredError(), optimizer=lambda rate, named: paddle.optimizer.SGD(
            rate, [p for _, p in named]
        ), schedule=paddle.optimizer.lr.StepDecay(0.1, 1), precision=Precision(dtype="float64"), compile=True,
        samples=lambda: paddle.randn([2, 4]),
    )  # fmt: skip
    assert is_compiled(full_model_learner(task, Mesh.alone()).model)


class Refusing(nn.Layer):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        raise UsageError("set it otherwise.")


def test_what_refuses_within_a_trace_is_said_without_the_trace() -> None:
    """Paddle puts all frames of the program into the message; that was a screen full of files."""
    with pytest.raises(UsageError, match=r"^set it otherwise\.$"):
        compiled(Refusing(), lambda: paddle.randn([2, 4]))


@pytest.mark.parametrize(
    ("degrees", "recompute", "sync_batch_norm", "said"),
    [
        ({"tensor": 2}, "none", False, "ranks of the tensor axis meet within the forward"),
        ({"data": 2, "sharding": 2}, "none", False, "ranks of the sharding axis"),
        ({"data": 2}, "full", False, "strategy.recompute=none"),
        ({"data": 2}, "none", True, "strategy.sync_batch_norm=false"),
        ({"data": 2}, "none", False, ""),
        ({}, "none", True, ""),
    ],
)
def test_a_layout_within_the_forward_is_refused(
    degrees: dict[str, int], recompute: str, sync_batch_norm: bool, said: str
) -> None:
    config = SimpleNamespace(sync_batch_norm=sync_batch_norm)
    recipe = SimpleNamespace(
        train=SimpleNamespace(compile=True),
        strategy=SimpleNamespace(config=config),
        adapter=None,
        model_fields_set=set(),
    )
    layout = Layout(degrees=Degrees(**degrees), recompute=Recompute.parse(recompute))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1D(2))
    if not said:
        check_compiles(recipe, layout, model)
        return
    with pytest.raises(UsageError, match=said):
        check_compiles(recipe, layout, model)
    recipe.train.compile = False
    check_compiles(recipe, layout, model)


def test_batch_norm_over_all_ranks_is_no_matter_where_the_model_has_none() -> None:
    """sync_batch_norm is the default: what has no BatchNorm must compile with it, and what has is refused when the
    model could not be built ahead."""
    recipe = SimpleNamespace(
        train=SimpleNamespace(compile=True),
        strategy=SimpleNamespace(config=DataParallel()),
        adapter=None,
        model_fields_set=set(),
    )
    check_compiles(recipe, Layout(degrees=Degrees(data=2)), nn.Linear(2, 2))
    model = synchronize(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1D(2)), Mesh())
    with pytest.raises(UsageError, match=r"strategy\.sync_batch_norm=false"):
        compiled(model, None, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["{use: data_parallel}", "{use: hybrid}"])
def test_ranks_with_programs_are_one_process_without(strategy: str, tmp_path) -> None:
    found = run_ranks(train, 2, str(tmp_path), strategy, more=["train.compile=true"])
    assert_same(found, truth())


@pytest.mark.long
def test_dropout_is_drawn_by_layers_or_by_each_rank(tmp_path) -> None:
    with pytest.raises(AssertionError, match=r"train\.dropout=own"):
        run_ranks(train, 1, str(tmp_path), "{use: single}", more=["train.compile=true", "model.dropout=0.5"])
    with_own = ["train.compile=true", "model.dropout=0.5", "train.dropout=own"]
    assert run_ranks(train, 1, str(tmp_path), "{use: single}", more=with_own)[0]["rows"]
