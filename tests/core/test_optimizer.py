"""A clip by a global norm in every layout is Paddle's own on one process: its groups, and what it leaves out. An
optimizer that takes norms over parameters does not update slices of them; one that nobody knows is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.incubate.optimizer import LarsMomentumOptimizer
from paddle.nn import ClipGradByGlobalNorm as Clip

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.core.optimizer import (
    Rate,
    bound_of,
    check_by_parameter,
    check_elementwise,
    check_not_wrapper,
    check_rate,
    take_clips,
)
from paddle_dp.core.turns import TurnOptimizers
from paddle_dp.core.updates import Adafactor, Lars, Muon
from paddle_dp.errors import UsageError
from paddle_dp.learner import Precision, Task
from paddle_dp.learner.update import GradientNorm
from paddle_dp.mesh import Mesh, join
from paddle_dp.part import read_part
from paddle_dp.train.state import model_shards
from tests.ranks import run_ranks

STEPS = 3


class Cut(nn.Layer):
    cuts: ClassVar = {"up": "colwise", "down": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.down(paddle.tanh(self.up(x)))


def model(cut: bool) -> nn.Layer:
    paddle.seed(1)
    made = (
        Cut()
        if cut
        else nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    )
    next(iter(made.parameters())).need_clip = False
    return made


def one_list(parameters: list[Any]) -> Any:
    return paddle.optimizer.AdamW(0.05, parameters=parameters, grad_clip=Clip(0.1))


def some(parameters: list[Any]) -> Any:
    """The others are the model's, get gradients, and are updated by nobody."""
    return paddle.optimizer.AdamW(0.05, parameters=parameters[2:], grad_clip=Clip(0.1))


def groups(parameters: list[Any]) -> Any:
    """Of four: one lies in one stage, one has a bound of its own, one is clipped by value, and one not at all."""
    own = [{"grad_clip": Clip(0.02)}, {}, {"grad_clip": nn.ClipGradByValue(0.01)}, {"grad_clip": None}]
    cuts = [parameters[:1], parameters[1:-2], parameters[-2:-1], parameters[-1:]]
    tables = [{"params": held, **settings} for held, settings in zip(cuts, own, strict=True)]
    return paddle.optimizer.AdamW(0.05, parameters=tables, grad_clip=Clip(0.1))


KINDS = {kind.__name__: kind for kind in (one_list, some, groups)}


def train(strategy: Any, kind: str) -> dict[str, Any]:
    made = model(strategy.mesh.axes.tensor > 1 or (strategy.mesh.ranks == 1 and kind.startswith("cut ")))
    draw = np.random.RandomState(0)
    x, y = draw.randn(8, 6), draw.randint(0, 4, 8)
    task = Task(
        model=made, loss=nn.CrossEntropyLoss(reduction="none"),
        optimizer=KINDS[kind.removeprefix("cut ")](list(made.parameters())), precision=Precision(dtype="float64"),
        samples=lambda: paddle.to_tensor(x[:2]),
    )  # fmt: skip
    learner, mesh = strategy.place(task), strategy.mesh
    share = 8 // mesh.dp_size
    mine = slice(mesh.dp_rank * share, (mesh.dp_rank + 1) * share)
    micro_batch = MicroBatch(paddle.to_tensor(x[mine]), paddle.to_tensor(y[mine]), share, mine.start)
    micro_batches, norms = (micro_batch,) if mesh.reads else (), []
    for index in range(STEPS):
        metrics = learner.train_batch(Batch(micro_batches, 8, index, 0), True)
        norms.append(metrics["gradient_norm"])
        for name, parameter in learner.placed.named_parameters():  # as a callback may
            parameter.need_clip = not name.endswith("bias")
    return {"norms": [[0], norms], **{shard.name: [shard.offset, shard.array] for shard in shards(learner)}}


def shards(learner: Any) -> list[Any]:
    return list(model_shards(learner).values())


def learned(words: list[dict[str, Any]]) -> list[Any]:
    """In each rank, by layout and optimizer: what lies here after some updates, and what one process has then."""
    mesh, found, whole = join(seed=0), [], {}
    alone = read_part("strategies", {"use": "single"}).build(Mesh(rank=0, ranks=1, device="cpu"))
    for strategy in words:
        for kind in KINDS:
            if (strategy.get("sharding") and kind != "one_list") or (
                strategy.get("servers") and kind == "groups"
            ):
                continue  # refused: groups, and in stages 2 and 3 parameters that nobody updates
            name = ("cut " if strategy.get("tensor") else "") + kind
            placer = read_part("strategies", {"use": "hybrid", **strategy}).build(mesh)
            mine = train(placer, name)
            whole[name] = whole.get(name) or train(alone, name)
            found.append([f"{strategy} {kind}", mine, whole[name]])
    return found


def test_in_every_layout() -> None:
    layouts = [
        {"pipeline": 2},
        {"tensor": 2},
        {"data": 2},
        {"sharding": 2},
        {"sharding": 2, "sharding_stage": 3},
        {"use": "parameter_server", "servers": 1},
    ]
    for rank in run_ranks(learned, 2, layouts):
        for case, mine, whole in rank:
            for name, (offset, array) in mine.items():
                there = np.array(whole[name][1])
                box = tuple(slice(o, o + n) for o, n in zip(offset, np.shape(array), strict=True))
                np.testing.assert_allclose(
                    array, there[box], rtol=1e-9, atol=1e-12, err_msg=f"{case}: {name}"
                )


class OwnClip(Clip):
    """A clip of the user's own, which may do anything."""


@pytest.mark.parametrize("clip", [OwnClip(1.0), nn.ClipGradByNorm(1.0)])
def test_a_clip_of_another_kind_is_refused(clip: Any) -> None:
    parameters = nn.Linear(2, 2).parameters()
    with pytest.raises(UsageError, match=f"not {type(clip).__name__}"):
        take_clips(paddle.optimizer.SGD(0.1, parameters=parameters, grad_clip=clip))
    grouped = [{"params": parameters, "grad_clip": clip}]
    with pytest.raises(UsageError, match=f"not {type(clip).__name__}"):
        take_clips(paddle.optimizer.SGD(0.1, parameters=grouped))


class Own(paddle.optimizer.SGD):
    """An optimizer of the user's own: its `step` may do anything."""


class OwnLamb(paddle.optimizer.Lamb):
    pass


ELEMENTWISE = [
    "SGD", "Momentum", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSProp", "ASGD", "Rprop",
]  # fmt: skip


def test_lion_computes_element_by_element() -> None:
    lion = read_part("optimizers", {"use": "lion"}).build(0.1, list(nn.Linear(2, 2).named_parameters()))
    assert check_elementwise(lion, 2) == []
    assert check_by_parameter(lion, sharding=2) == []


def weights() -> list[paddle.Tensor]:
    return nn.Linear(2, 2).parameters()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_paddles_own_that_compute_element_by_element(name: str) -> None:
    assert check_elementwise(getattr(paddle.optimizer, name)(0.1, parameters=weights()), 2) == []


@pytest.mark.parametrize(
    "kind",
    [paddle.optimizer.Lamb, OwnLamb, LarsMomentumOptimizer, paddle.optimizer.LBFGS, Lars, Adafactor, Muon],
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
    strategy = read_part("strategies", {"use": "hybrid", "tensor": 2, "data": 1}).build(join(seed=1))

    def place(kind: Any, finished: bool = True) -> Any:
        cut = Cut()
        optimizer = lambda rate, named: kind(0.1, parameters=[p for _, p in named])  # noqa: E731
        finished_optimizer = kind(0.1, parameters=cut.parameters()) if finished else optimizer
        task = Task(model=cut, loss=nn.CrossEntropyLoss(reduction="none"), optimizer=finished_optimizer)
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


def test_each_update_sets_the_rate_of_the_schedule() -> None:
    layer = paddle.nn.Linear(2, 2)
    optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
    rate = Rate(optimizer, paddle.optimizer.lr.StepDecay(0.1, step_size=1, gamma=0.5))
    rate.step()
    assert (rate.steps, optimizer.get_lr()) == (1, 0.05)


def test_a_scheduler_that_a_callback_gives_is_refused_at_the_next_update() -> None:
    """Nothing would step it, and the first save formatted it as a number."""
    layer = paddle.nn.Linear(2, 2)
    for schedule in (None, paddle.optimizer.lr.StepDecay(0.1, step_size=1)):
        optimizer = paddle.optimizer.SGD(0.1, parameters=layer.parameters())
        rate = Rate(optimizer, schedule)
        optimizer.set_lr_scheduler(paddle.optimizer.lr.ExponentialDecay(0.1, 0.5))
        assert rate.replaced is None
        with pytest.raises(
            UsageError, match="another schedule, ExponentialDecay, which is neither stepped nor"
        ):
            rate.step()


def test_the_rate_of_a_single_turns_optimizer_is_looked_at_as_the_others() -> None:
    """A schedule that a callback gave to one turn's optimizer was neither stepped nor refused."""
    sgd = paddle.optimizer.SGD
    constant = paddle.optimizer.lr.LambdaDecay(0.1, lambda step: 1.0)
    both = TurnOptimizers(0.1, [sgd(0.1, parameters=weights()) for _ in range(2)], ["x", "y"])
    check_rate(both, constant)
    rate = Rate(both, constant)
    assert rate.replaced is None
    both.members[1].set_lr(0.5)
    assert rate.replaced == (0.5, 0.1)
    with pytest.raises(UsageError, match=r"turns\.y\.optimizer: .* rate 0\.1, but has 0\.5, .* lr_scale"):
        check_rate(both, constant)
    both.members[1].set_lr_scheduler(paddle.optimizer.lr.ExponentialDecay(0.1, 0.5))
    assert rate.replaced is None
    with pytest.raises(
        UsageError, match=r"another schedule, ExponentialDecay, .* Trainer\.of\(schedule=…\)\.$"
    ):
        rate.step()
    with pytest.raises(UsageError, match="another scheduler, which would not be stepped"):
        Rate(both, constant)


@pytest.mark.parametrize(
    ("settings", "moves"),
    [
        ({"use": "constant"}, False),
        ({"use": "constant", "warmup": "1 steps"}, True),
        ({"use": "constant", "warmup": "5 steps"}, True),
        ({"use": "cosine", "floor": 0.5}, True),
        ({"use": "milestones", "milestones": ["900 epochs"]}, True),
        ({"use": "plateau", "watch": "loss"}, True),
    ],
)
def test_a_turn_keeps_a_rate_of_its_own_where_the_schedule_never_sets_one(
    settings: dict[str, Any], moves: bool
) -> None:
    """A GAN with twice the rate in one turn was refused under a constant schedule, and under none."""
    part = read_part("schedules", {"learning_rate": 0.1, **settings})
    schedule = part.build(steps=1000, steps_per_epoch=1, batch=8)
    members = [paddle.optimizer.SGD(rate, parameters=weights()) for rate in (schedule(), 0.2)]
    both = TurnOptimizers(schedule(), members, ["x", "y"])
    if moves:
        with pytest.raises(UsageError, match=r"turns\.y\.optimizer: .* has 0\.2, and each update sets"):
            check_rate(both, schedule)
        return
    check_rate(both, schedule)
    rate = Rate(both, schedule)
    rate.step()
    assert [each.get_lr() for each in members] == [0.1, 0.2]


def test_a_norm_that_is_not_finite_on_one_rank_is_not_finite_on_all() -> None:
    norm = GradientNorm([])
    assert norm.from_row(3.0, norm.to_row(3.0)) == 3.0
    assert norm.from_row(3.0, norm.to_row(float("inf"))) == float("inf")


def test_only_one_clip_has_a_bound_of_all_gradients() -> None:
    def bound(*bounds: float) -> float | None:
        norm = SimpleNamespace(clips=[SimpleNamespace(bound=each) for each in bounds])
        return bound_of(SimpleNamespace(mode=SimpleNamespace(norm=norm), optimizer=None))

    assert (bound(), bound(0.5), bound(0.5, 0.25)) == (None, 0.5, None)
