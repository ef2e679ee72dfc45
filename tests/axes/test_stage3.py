"""A parameter under ZeRO-3: where it is, when, what travels. Fleet's own stage 3 is in `tests/sim/test_fleet.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet

from paddle_dp import Trainer
from paddle_dp.axes.sharding.prefetch_trace import PrefetchTrace, TraceRecorder
from paddle_dp.axes.sharding.stage3 import parameters_by_layer
from paddle_dp.axes.sharding.zero import Zero
from paddle_dp.core.placement import Placements
from paddle_dp.gloo import install
from paddle_dp.mesh import join
from paddle_dp.mesh.messages import CHANNELS
from paddle_dp.mesh.transport import HEADER, Endpoint
from paddle_dp.plan.sharded import max_fetched
from paddle_dp.train import Callback
from tests.core.test_consistency import place, step
from tests.house.datasets import Points
from tests.ranks import run_ranks

WIDTH, LAYERS = 32, 8


def chain(layers: int, learns: Any = None) -> Any:
    """Linear layers in a row; `learns`: the names of the parameters that are not frozen, all unless it is said."""
    paddle.seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = learns is not None and name not in learns
    return model


def placed(prefetch: int, layers: int = LAYERS, learns: Any = None) -> Any:
    """A chain of linear layers, its sharding over two ranks, and the first layer's weights."""
    install(join().device)
    how = fleet.DistributedStrategy()
    how.hybrid_configs = {"dp_degree": 1, "sharding_degree": 2}
    fleet.init(is_collective=True, strategy=how)
    model = chain(layers, learns)
    optimizer = paddle.optimizer.SGD(0.1, parameters=[p for p in model.parameters() if not p.stop_gradient])
    hcg = fleet.get_hybrid_communicate_group()
    values = model[0].weight.numpy()
    return model, Zero(model, optimizer, hcg, Placements(), 3, prefetch=prefetch), values


@contextmanager
def sent() -> Iterator[dict[str, int]]:
    """The bytes that this rank's endpoint sends meanwhile: parameters, gradients, and everything else."""
    names = {CHANNELS["lent"]: "parameters", CHANNELS["gradients"]: "gradients"}
    bytes_of, send = {"parameters": 0, "gradients": 0, "rest": 0}, Endpoint.send

    def counted(self: Endpoint, group: int, rank: int, *data: memoryview) -> None:
        bytes_of[names.get(group, "rest")] += HEADER.size + sum(map(len, data))
        send(self, group, rank, *data)

    Endpoint.send = counted  # type: ignore[method-assign]
    try:
        yield bytes_of
    finally:
        Endpoint.send = send  # type: ignore[method-assign]


def steps(prefetch: int) -> dict[str, Any]:
    """In a rank: three forwards and backwards, and an evaluation. What is here at the first layer and between steps,
    what the third step sends, and the most that was lent at once."""
    model, zero, values = placed(prefetch)
    first, seen = model[0].weight, []
    see = lambda *_: seen.append(bool(first._is_initialized()))  # noqa: E731
    model[0].register_forward_pre_hook(
        lambda layer, _: seen.append(bool((layer.weight.numpy() == values).all()))
    )
    model[3].register_forward_pre_hook(see)
    x, gradients = paddle.ones([2, WIDTH]), []
    for _ in range(3):
        see()
        with sent() as bytes_of:
            model(x).sum().backward()
            zero.finish()
        gradients.append([p.grad is not None for p in model.parameters()])
        for parameter in model.parameters():
            parameter.clear_gradient(False)
    with paddle.no_grad():
        model(x)
    zero.finish()
    see()
    return {
        "owner": zero.owner(first) == zero.group.rank,
        "seen": seen,
        "gradients": [sum(of_step) for of_step in gradients],
        "sent": bytes_of,
        "most": zero.stage3.most,
        "size": sum(4 * int(p.size) for p in model.parameters()),
    }


def all_steps() -> dict[str, Any]:
    """In a rank: all that the tests of two ranks ask, by whether parameters are frozen and what travels ahead."""
    return {
        f"{name} {prefetch}": function(prefetch)
        for name, function in (("learning", steps), ("frozen", frozen_steps))
        for prefetch in (0, 1)
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(all_steps, 2)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_weight_is_here_while_its_layer_works_and_with_its_owner_always(two: Any, prefetch: int) -> None:
    ranks = [rank[f"learning {prefetch}"] for rank in two]
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    for found in ranks:
        mine = found["owner"]
        assert found["seen"] == [*[mine, True, mine] * 3, True, mine, mine]
        assert found["gradients"] == [LAYERS] * 3  # of 16: each rank owns half of them
        if prefetch:  # two layers travel together, one weight of each owner, and two go before them
            assert found["most"] == pytest.approx(
                max_fetched([[layer, 0], [0, layer]] * (LAYERS // 2), 0, 1), rel=0.05
            )
        else:
            assert found["most"] <= layer
        assert found["sent"]["rest"] < 3000
    whole = ranks[0]["size"]
    # (n - 1)/n of it in forward, in backward all but the last layer or two, which are still here, and as gradients.
    parameters = sum(found["sent"]["parameters"] for found in ranks)
    assert parameters == pytest.approx(2 * whole - (1 + prefetch) * layer, rel=0.05)
    assert sum(found["sent"]["gradients"] for found in ranks) == pytest.approx(whole, rel=0.05)


LEARNS = ("2.bias", "7.weight")  # behind two frozen layers, which backward does not reach


def inputs(rank: int) -> Any:
    return paddle.to_tensor([[0.01 * (i + rank) for i in range(WIDTH)]])


def frozen_steps(prefetch: int) -> dict[str, Any]:
    """In a rank: three forwards and backwards of a chain of which two parameters learn: its own gradients, the bytes of
    other owners' parameters that were here in the midst of a backward and after it, and what the last step sent."""
    model, zero, _ = placed(prefetch, learns=LEARNS)
    rank, here, gradients = zero.group.rank, list[int](), dict[str, Any]()
    owners = {name: zero.owner(p) for name, p in model.named_parameters()}

    def count(*_: Any) -> None:
        others = [p for p in model.parameters() if zero.owner(p) != rank]
        here.append(sum(4 * int(p.size) for p in others if p._is_initialized()))

    for _ in range(3):
        with sent() as bytes_of:
            hidden = model[:4](inputs(rank))
            hidden.register_hook(count)  # four layers' backwards are done
            model[4:](hidden).sum().backward()
            zero.finish()
        count()
        gradients = {n: p.grad.numpy().tolist() for n, p in model.named_parameters() if p.grad is not None}
        for parameter in model.parameters():
            parameter.clear_gradient(False)
    return {
        "owners": owners, "here": here, "gradients": gradients, "sent": bytes_of, "most": zero.stage3.most,
    }  # fmt: skip


@pytest.mark.parametrize("prefetch", [0, 1])
def test_frozen_weights_are_sharded_and_freed_where_backward_is_done_with_them(
    two: Any, prefetch: int
) -> None:
    ranks = [rank[f"frozen {prefetch}"] for rank in two]
    whole = chain(LAYERS, LEARNS)
    for rank in range(2):
        whole(inputs(rank)).sum().backward()
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    found = {name: gradient for of_rank in ranks for name, gradient in of_rank["gradients"].items()}
    assert set(found) == set(LEARNS) and set(ranks[0]["owners"].values()) == {0, 1}
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, dict(whole.named_parameters())[name].grad.numpy(), rtol=1e-6)
    for of_rank in ranks:
        # Of layers 4 and 3, each with one parameter of the other owner's; between steps nothing.
        assert of_rank["here"] == [layer, 0] * 3
        assert of_rank["most"] <= (1.1 + 2 * prefetch) * layer
    sent_bytes = sum(of_rank["sent"]["parameters"] for of_rank in ranks)
    # All of it in forward; in backward layers 2 to 7, but for what is still here.
    assert (LAYERS + 6 - 1 - 2 * prefetch) * layer * 0.95 <= sent_bytes <= (LAYERS + 6) * layer * 1.05
    gradients = 4 * (WIDTH + WIDTH * WIDTH)
    assert sum(of_rank["sent"]["gradients"] for of_rank in ranks) == pytest.approx(gradients, rel=0.1)


class Empty(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.nothing = self.create_parameter([0, 4])

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class Outside(nn.Layer):
    """Writes a frozen layer's weights, as an inner teacher's, before that layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3)
        for parameter in self.teacher.parameters():
            parameter.stop_gradient = True

    def forward(self, x: Any) -> Any:
        self.teacher.weight.set_value(self.teacher.weight * 0.9 + 0.1)
        return self.inner(x) + self.teacher(x)


class Added(nn.Layer):
    """Reads another layer's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Any) -> Any:
        return self.inner(x) + self.other.bias + self.other.bias


class Bypassed(Added):
    """Calls a layer's forward, as models of PaddleRec do."""

    def forward(self, x: Any) -> Any:
        return self.inner.forward(x) + self.other(x)


class Doubled(nn.Linear):
    def forward(self, x: Any) -> Any:
        return 2 * super().forward(x)


class Inherited(Added):
    """One of its layers calls its class's forward, and it reads another layer's bias."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubled(4, 3)


MODELS = {
    "empty": Empty, "outside": Outside, "added": Added, "predicted": Added, "bypassed": Bypassed,
    "inherited": Inherited,
}  # fmt: skip


def updated(kinds: list[str], stage: int) -> None:
    """In a rank: an update of each model, or a forward without one."""
    for kind in kinds:
        paddle.seed(0)
        mesh, learner = place([], {"use": "hybrid", "sharding": 2, "sharding_stage": stage}, MODELS[kind]())
        if kind == "predicted":
            learner.runner.predict(paddle.ones([2, 4]))
        else:
            step(mesh, learner)


ELSEWHERE = r"=3: \S*test_stage3\.py, line \d+ reads or writes a parameter outside of the forward of the"


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("empty", r"sharding_stage=3: parameter nothing of the model is empty and cannot be sharded\. Leave"),
        ("outside", ELSEWHERE),
        ("added", ELSEWHERE),
        ("predicted", ELSEWHERE),
        ("inherited", ELSEWHERE),
        (
            "bypassed",
            r"=3: \S*test_stage3\.py, line \d+ calls the method Linear\.forward, (.|\n)*: write self\.inner\(…\) in",
        ),
    ],
)
def test_what_cannot_be_lent_is_refused_with_its_reason(kind: str, said: str) -> None:
    """ "Tensor holds no memory", said Paddle, or "Tensor not initialized yet", in an evaluation, too."""
    with pytest.raises(AssertionError, match=said):
        run_ranks(updated, 2, [kind], 3)


def test_what_cannot_be_lent_trains_in_stage_2() -> None:
    assert run_ranks(updated, 2, [*MODELS], 2) == [None, None]


class Listed(nn.Layer):
    """Has its biases in lists, of which one does not learn."""

    def __init__(self) -> None:
        super().__init__()
        biases = [
            self.create_parameter([3], default_initializer=nn.initializer.Constant(n)) for n in (1.0, 2.0)
        ]
        biases[1].stop_gradient = True
        self.weight = self.create_parameter([4, 3])
        self.lists = nn.LayerList([nn.ParameterList([bias]) for bias in biases])

    def forward(self, x: Any) -> Any:
        return paddle.nn.functional.linear(x, self.weight, self.lists[0][0]) * self.lists[1][0]


class Tied(nn.Layer):
    """Reads another layer's bias, which is in a list of this one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3, bias_attr=nn.initializer.Constant(3.0))
        self.weight = self.create_parameter([4, 3])
        self.biases = nn.ParameterList([self.body.bias])

    def forward(self, x: Any) -> Any:
        return self.body(x) + paddle.nn.functional.linear(x, self.weight, self.biases[0])


def listed(kind: str, stage: int) -> list[Any]:
    """In a rank: outputs before and after two updates."""
    paddle.seed(0)
    model = Listed() if kind == "listed" else Tied()
    mesh, learner = place([], {"use": "hybrid", "sharding": 2, "sharding_stage": stage}, model)
    outputs = [learner.runner.predict(paddle.ones([1, 4])).tolist()]
    step(mesh, learner)
    return [*outputs, learner.runner.predict(paddle.ones([1, 4])).tolist()]


@pytest.mark.parametrize("kind", ["listed", "tied"])
def test_parameters_in_a_list_are_here_while_the_layer_with_the_list_works(kind: str) -> None:
    """F.linear took a bias without values for none: other numbers, silently."""
    here = run_ranks(listed, 2, kind, 3)
    assert here[0] == here[1]
    np.testing.assert_allclose(here[0], run_ranks(listed, 2, kind, 2)[0], rtol=1e-6)


class OwnHead(nn.Layer):
    """Its loss calls a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Linear(16, 4)

    def forward(self, x: Any) -> Any:
        return self.body(x)

    def loss(self, outputs: Any, targets: Any) -> Any:
        return paddle.nn.functional.cross_entropy(self.head(outputs), targets, reduction="none")


def evaluated_between(stage: int, folder: str) -> list[dict[str, float]]:
    """In a rank: the losses of updates, and of evaluations by the weights and by their average."""
    rows: list[dict[str, float]] = []

    class Rows(Callback):
        def step(self, moment: Any) -> None:
            rows.append({"loss": moment.numbers["loss"]})

        def evaluated(self, moment: Any, evaluation: Any) -> None:
            rows.append(dict(evaluation.numbers))

    paddle.seed(0)
    data = Points(32)
    model = OwnHead()
    Trainer.of(
        model=model, loss=model.loss, optimizer="adamw", schedule={"use": "constant", "learning_rate": 0.05},
        train=data, test=Points(16, seed=1), batch=8, ema={"decay": 0.9}, folder=folder,
        strategy={"use": "hybrid", "sharding": 2, "sharding_stage": stage},
        callbacks=[Rows(), {"use": "evaluate", "every": "2 steps"}],
    ).fit("8 steps")  # fmt: skip
    return rows


def test_layers_that_the_loss_calls_have_the_weights_that_are_evaluated(tmp_path: Path) -> None:
    """They kept the averages' for the next update, silently, and a rank without a sample fell out of step."""
    two, three = (run_ranks(evaluated_between, 2, stage, str(tmp_path / str(stage)))[0] for stage in (2, 3))
    assert len(two) == len(three) == 12
    for one, other in zip(two, three, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_a_list_of_other_layers_parameters_lends_none() -> None:
    """The model would hold all of them during its forward, and most of its backward: stage 3 for nothing."""
    model = nn.Layer()
    model.forward = lambda x: x
    model.blocks = nn.LayerList([nn.Linear(2, 2) for _ in range(3)])
    model.weights = nn.ParameterList([block.weight for block in model.blocks])
    model.factors = nn.ParameterList([model.create_parameter([2])])
    lent = {id(layer): parameters for layer, parameters in parameters_by_layer(model)}
    assert [id(p) for p in lent[id(model)]] == [id(model.factors[0])]
    assert all(len(lent[id(block)]) == 2 for block in model.blocks) and len(lent) == 4


def learned(layers: int, ahead: int) -> PrefetchTrace:
    """Of a chain of layers with one parameter each: forward, then backward."""
    diary = TraceRecorder()
    for layer in range(layers):
        diary.need((layer,))
        diary.release(layer)
    for layer in reversed(range(layers)):
        diary.need((layer,))
        diary.gradient(layer)
        diary.release(layer)
    return diary.order([[100]] * layers, ahead)


def test_what_forward_still_has_is_not_sent_again() -> None:
    order = learned(4, ahead=0)
    assert order.needs == ((0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,))
    assert order.travels == ((0,), (1,), (2,), (3,), (), (2,), (1,), (0,))
    assert order.retained == {(3, 3)}
    assert order.gradients == (3, 2, 1, 0)


def test_with_one_layer_ahead_is_asked_for_two() -> None:
    order = learned(4, ahead=1)
    assert [order.until(number, 1) for number in range(8)] == [2, 3, 4, 5, 6, 7, 8, 8]
    assert [order.until(number, 0) for number in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_parameter_that_is_needed_again_at_once_stays_in_between() -> None:
    """As a weight that two neighbours share, or one that recompute's second forward leaves to backward."""
    diary = TraceRecorder()
    for need in ((0, 1), (1, 2), (3,), (1,)):
        diary.need(need)
        for index in need:
            diary.release(index)
    assert diary.order([[9]] * 4, prefetch=0).travels == ((0, 1), (2,), (3,), (1,))
    assert diary.order([[9]] * 4, prefetch=1).travels == ((0, 1), (2,), (3,), ())


def test_what_is_used_until_the_end_is_not_released() -> None:
    diary = TraceRecorder()
    diary.need((0,))
    diary.need((1,))
    diary.release(1)
    diary.release(5)  # of a pass before
    assert diary.order([[1], [1]], 1).retained == frozenset()


def test_equal_passes_have_equal_digests() -> None:
    assert learned(3, 1).digest() == learned(3, 1).digest()
    assert learned(3, 1).digest() != learned(4, 1).digest()
