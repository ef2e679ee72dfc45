"""Turns: each trains some of the parameters by a loss of its own, and equals a loop by hand, on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.core.loss import as_loss
from paddle_dp.core.turns import Turn, TurnsLoss, joined
from paddle_dp.data import Sampler
from paddle_dp.errors import LossError, RecipeError, UsageError
from paddle_dp.learner import Task, full_model_learner
from paddle_dp.mesh import Mesh
from paddle_dp.part.groups import turns_of
from paddle_dp.recipe import read_recipe
from paddle_dp.units import EverySteps
from tests.house.training import diary, untried
from tests.ranks import run_ranks

SAMPLES, BATCH, EPOCHS = 22, 6, 2  # the last batch of an epoch has 4


class Pairs:
    """Noise [3], and a real vector [5]."""

    def __init__(self) -> None:
        draw = np.random.RandomState(0)
        self.noise = draw.randn(SAMPLES, 3).astype("float64")
        self.real = draw.rand(SAMPLES, 5).astype("float64")

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return self.noise[i], self.real[i]


class Adversaries(nn.Layer):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 5))
        self.discriminator = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Dropout(drop), nn.Linear(8, 1))

    def forward(self, noise: Any) -> Any:
        return self.generator(noise)

    def discriminator_loss(self, generated: Any, real: Any) -> Any:
        return F.softplus(-self.discriminator(real)) + F.softplus(self.discriminator(generated.detach()))

    def generator_loss(self, generated: Any, real: Any) -> Any:
        return F.softplus(-self.discriminator(generated))


def model_of(drop: float = 0.0) -> Adversaries:
    paddle.seed(5)
    return Adversaries(drop)


def train(
    folder: str, drop: float = 0.0, every: int = 1, rule: Any = None, resume: bool = False, epochs: int = EPOCHS,
    **settings: Any,
) -> Any:  # fmt: skip
    """Trains on all ranks; returns the weights that this rank has, the losses of each step, and held-out numbers."""
    data = Pairs()
    trainer = Trainer.of(
        model=model_of(drop),
        turns={
            "discriminator": {"match": ["discriminator"]},
            "generator": {"match": "generator.*", "every": f"{every} steps", "optimizer": rule},
        },
        optimizer={"use": "adamw", "weight_decay": 0.01, "beta1": 0.5},
        schedule={"use": "constant", "learning_rate": 1e-2},
        train=data, test=data, batch=BATCH, length=f"{EPOCHS} epochs", precision="float64",
        callbacks=["evaluate", {"use": "checkpoint", "every": "1 epoch"}], folder=folder, resume=resume,
        **settings,
    )  # fmt: skip
    lines = diary(trainer)
    trainer.fit(f"{epochs} epochs")
    named = trainer.learner.placed.named_parameters()
    stored = {name: p.numpy() for name, p in named if p._is_initialized() and p.size}
    losses = [{name: value for name, value in row.items() if name.endswith("loss")} for row in lines.steps]
    return [stored, losses, lines.held_out]


def train_each(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One case after the other in the same ranks; the first one is tried before."""
    found = {}
    for name, case in cases.items():
        found[name] = train(f"{folder}/{name}", **case)
        untried()
    return found


def by_hand(every: int = 1, with_momentum: bool = False) -> Any:
    """The same training, as a plain loop in float64."""
    model, data = model_of(), Pairs()
    model.to(dtype="float64")

    def adamw(net: nn.Layer) -> Any:
        return paddle.optimizer.AdamW(
            1e-2, beta1=0.5, parameters=net.parameters(), weight_decay=0.01,
            apply_decay_param_fun=lambda name: ".w_" in name,  # a recipe's adamw decays no biases
        )  # fmt: skip

    def momentum(net: nn.Layer) -> Any:
        clip = nn.ClipGradByGlobalNorm(BOUND)
        return paddle.optimizer.Momentum(1e-2, 0.9, parameters=net.parameters(), grad_clip=clip)

    optimizers = {
        "discriminator": adamw(model.discriminator),
        "generator": (momentum if with_momentum else adamw)(model.generator),
    }
    rows, step = [], 0
    for epoch in range(EPOCHS):
        order = order_of(epoch)
        for start in range(0, SAMPLES, BATCH):
            chosen = order[start : start + BATCH]
            noise, real = paddle.to_tensor(data.noise[chosen]), paddle.to_tensor(data.real[chosen])
            step, row = step + 1, {}
            for name, optimizer in optimizers.items():
                if name == "generator" and step % every:
                    continue
                loss = getattr(model, f"{name}_loss")(model(noise), real).mean()
                loss.backward()
                optimizer.step()
                for each in optimizers.values():
                    each.clear_grad()
                row[f"{name}_loss"] = float(loss)
            rows.append(row)
    return {name: p.numpy() for name, p in model.named_parameters()}, rows


def order_of(epoch: int) -> np.ndarray:
    return Sampler.for_dataset(Pairs(), BATCH, Mesh.alone(), seed=0, shuffle=True).order(epoch)


BOUND = 0.05  # below the norm of the generator's gradients
MOMENTUM = {"use": "momentum", "momentum": 0.9, "clip": BOUND}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "every": {"every": 3, "drop": 0.3, "micro_batches": 2},
    "momentum": {"rule": MOMENTUM},
}
HYBRID: dict[str, dict[str, Any]] = {
    f"zero{stage}": {"rule": MOMENTUM, "strategy": {"use": "hybrid", "sharding": 2, "sharding_stage": stage}}
    for stage in (3, 2, 1)
} | {
    "bucketed": {"strategy": {"use": "data_parallel", "exchange": "bucketed"}},
    "after": {"strategy": {"use": "data_parallel", "exchange": "after"}},
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(train_each, 1, str(tmp_path_factory.mktemp("one")), CASES | {"third": {"every": 3}})[0]


def assert_same(result: Any, reference: Any, tolerance: float = 1e-12) -> None:
    weights, rows, held_out = result
    assert weights, "no weights were compared"
    for name, weight in weights.items():
        np.testing.assert_allclose(weight, reference[0][name], atol=tolerance, err_msg=name)
    assert [row.keys() for row in rows] == [row.keys() for row in reference[1]]
    for row, expected in zip(rows, reference[1], strict=True):
        np.testing.assert_allclose(list(row.values()), list(expected.values()), rtol=tolerance)
    if held_out or reference[2:]:
        assert held_out == pytest.approx(reference[2], rel=tolerance)


@pytest.mark.parametrize(("every", "with_momentum"), [(1, False), (3, False), (1, True)])
def test_turns_are_the_loop_by_hand(one: dict[str, Any], every: int, with_momentum: bool) -> None:
    """Each with an optimizer of its own; the generator's forward reads the discriminator that was just updated."""
    weights, rows = by_hand(every, with_momentum)
    result = one["momentum" if with_momentum else "plain" if every == 1 else "third"]
    losses = [{key: row[key] for key in row if key != "loss"} for row in result[1]]
    for name, weight in weights.items():
        np.testing.assert_allclose(result[0][name], weight, atol=1e-12, err_msg=name)
    assert losses == [pytest.approx(row, rel=1e-12) for row in rows]
    assert [("generator_loss" in row) for row in losses] == [
        step % every == 0 for step in range(1, len(rows) + 1)
    ]


def compare(one: dict[str, Any], found: list[Any], cases: dict[str, dict[str, Any]]) -> None:
    for rank in found:
        for name, result in rank.items():
            assert_same(
                result, one[name if name in CASES else "momentum" if "rule" in cases[name] else "plain"]
            )


SOME = {"every": CASES["every"], "zero3": HYBRID["zero3"]}
RESUMED: dict[str, Any] = {"drop": 0.3, "every": 3, "rule": MOMENTUM}


def train_and_resume(folder: str) -> list[Any]:
    """Some cases; one that ends after the first epoch, and goes on from its checkpoint; and the same without an end."""
    some = train_each(folder, SOME)
    train(f"{folder}/resumed", epochs=1, **RESUMED)
    return [some, train(f"{folder}/resumed", resume=True, **RESUMED), train(f"{folder}/whole", **RESUMED)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(train_and_resume, 2, str(tmp_path_factory.mktemp("two")))


def test_on_two_ranks(one: dict[str, Any], two: list[Any]) -> None:
    compare(one, [some for some, *_ in two], SOME)


@pytest.mark.long
def test_in_every_layout(one: dict[str, Any], tmp_path: Path) -> None:
    """Shares of 6 samples on 3 ranks, of 4 in the last batch of an epoch: unequal ones."""
    for ranks, cases in ((2, {"plain": {}, **HYBRID}), (3, CASES)):
        compare(one, run_ranks(train_each, ranks, str(tmp_path / str(ranks)), cases, timeout=300), cases)


def test_evaluation_has_the_numbers_of_each_turn(one: dict[str, Any]) -> None:
    model, data = model_of(), Pairs()
    model.to(dtype="float64")
    model.set_state_dict({name: paddle.to_tensor(np.array(w)) for name, w in one["plain"][0].items()})
    generated, real = model(paddle.to_tensor(data.noise)), paddle.to_tensor(data.real)
    losses = {f"{name}_loss": float(getattr(model, f"{name}_loss")(generated, real).mean())
              for name in ("discriminator", "generator")}  # fmt: skip
    assert one["plain"][2] == pytest.approx({"loss": sum(losses.values()), **losses}, rel=1e-12)


def test_resume_is_bit_equal(two: list[Any]) -> None:
    """Also the turn that is left out in some steps goes on with the right one."""
    for _, one_rank, all_at_once in two:
        assert one_rank[0] == all_at_once[0] and one_rank[1] == all_at_once[1][-len(one_rank[1]) :]


# One process, arithmetic ----------------------------------------------------------------------------------------------


def turn(name: str, loss: Any, number: int = 0, match: Sequence[str] = ("*",)) -> Turn:
    return Turn(name=name, number=number, match=match, loss=as_loss(loss), every=EverySteps(1, "steps"))


def test_a_turn_fixes_the_other_parameters_and_frees_them_again() -> None:
    model = model_of()
    loss = TurnsLoss([turn("a", model.generator_loss, match=["generator.*"])])

    def step() -> None:
        with loss.during(loss.turns[0], list(model.named_parameters())):
            trained = [name for name, p in model.named_parameters() if not p.stop_gradient]
            assert trained == [
                f"generator.{layer}.{tensor}" for layer in (0, 2) for tensor in ("weight", "bias")
            ]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    assert not any(p.stop_gradient for p in model.parameters())


def test_what_was_frozen_in_the_midst_stays_frozen() -> None:
    """The first turn that does not train it unfroze it."""
    model = model_of()
    generator, discriminator = model.generator_loss, model.discriminator_loss
    loss = TurnsLoss(
        [turn("a", generator, match=["generator.*"]), turn("b", discriminator, 1, ["discriminator.*"])]
    )
    named = list(model.named_parameters())
    frozen = [model.generator[0].weight, model.discriminator[0].bias]
    for parameter in frozen:
        parameter.stop_gradient = True
    for each in loss.turns:
        with loss.during(each, named):
            assert all(p.stop_gradient for p in frozen)
        assert [p.name for _, p in named if p.stop_gradient] == [p.name for p in frozen]


def test_losses_that_count_differently_are_not_added_up() -> None:
    loss = TurnsLoss([turn("a", lambda x, y: x.sum(-1)), turn("b", lambda x, y: x)])
    with pytest.raises(LossError, match="turns a and b count 2 and 6"):
        loss(paddle.ones([2, 3]), paddle.ones([2]))


def test_the_numbers_of_turns_are_joined() -> None:
    rows = {"a": {"loss": 1.0, "acc1": 0.5, "gradient_norm": 3.0}, "b": {"loss": 2.0, "gradient_norm": 4.0}}
    assert joined(rows) == {
        "loss": 3.0, "a_loss": 1.0, "a_acc1": 0.5, "a_gradient_norm": 3.0, "b_loss": 2.0, "b_gradient_norm": 4.0,
        "gradient_norm": 5.0,
    }  # fmt: skip
    rows["b"] = {"loss": math.nan, "gradient_norm": 0.0}  # nothing in the batch counted
    assert joined(rows)["loss"] == 1.0


GAN = Path(__file__).parents[2] / "configs" / "digits_gan.yaml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "turns.generator.match=[gen.*]",
            "'gen.*' matches no trained parameter. Some are generator.0.weight",
        ),
        ("turns.generator.match=[generator.0]", "none trains 'generator.2.weight' and 3 more"),
        (
            "turns.generator.match=[discriminator,generator]",
            "turn discriminator trains 'discriminator.0.weight' and 5",
        ),
        ("turns.generator.evry=2 steps", "turns.generator has no setting 'evry'. Did you mean 'every'"),
        ("turns.generator.every=1 epoch", "is not a quantity like '50 steps'"),
        (
            "turns.generator.optimizer={use: adamw, betta1: 0.5}",
            "turns.generator.optimizer adamw has no setting 'betta1'. Did you mean 'beta1'",
        ),
        (
            "turns.generator.optimizer={use: adamw, beta1: 2}",
            "turns.generator.optimizer.beta1: 2 is not less than 1",
        ),
        (
            "turns.generator.loss={use: nothing_like_it}",
            "turns.generator.loss: there is no loss 'nothing_like_it'",
        ),
        ("turns.generator.loss=cross_entropy", "turns.generator.loss: a part is a group of settings"),
        ("mix={mixup: 0.2}", "mix: does not go with turns: a turn's loss compares inputs, such as noise"),
        ("turns.generator.match=[]", "turns.generator.match: is empty"),
        ("loss={use: mean_squared_error}", "each of the turns has a loss"),
        ("strategy={use: local_sgd}", "strategy: does not go with turns"),
        ("strategy={use: hybrid, pipeline: 2}", "strategy: does not go with turns"),
        ("strategy.compress=bfloat16", "strategy: does not go with turns"),
        ("guard.non_finite=skip", "guard: does not go with turns"),
        ("turns.generator.optimizer={use: muon}", "turns.generator.optimizer: muon acts on the whole model"),
        ("train.compile=true", "train.compile: does not go with turns"),
        (
            "turns.generator.every=2 steps; turns.discriminator.every=3 steps",
            "none has its turn in every step",
        ),
    ],
)
def test_what_does_not_fit_is_refused_at_the_door(override: str, message: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_recipe(GAN, override.split("; "))
    assert message in str(error.value)


def test_a_weight_that_two_layers_share_is_trained_by_the_turn_of_its_first_name() -> None:
    """A pattern for its second name alone would leave it out of every update."""
    model = model_of()
    model.generator[2].weight, model.discriminator[0].weight = (
        paddle.create_parameter([8, 8], "float64"),
    ) * 2
    patterns = {"generator": ["generator"], "discriminator": ["discriminator.0.bias", "discriminator.3"]}
    assert [len(trained) for trained in turns_of(patterns, model).values()] == [4, 3]
    patterns = {"generator": ["generator.0", "*.bias"], "discriminator": ["discriminator.*.weight"]}
    with pytest.raises(RecipeError, match=r"none trains 'generator.2.weight'"):
        turns_of(patterns, model)


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (["generator"], r"Trainer\.of\.turns"),
        ({"generator": "generator.*"}, r"Trainer\.of\.turns"),
        ({1: {"match": ["*"], "loss": lambda x, y: x.sum(-1)}}, r"Trainer\.of\.turns"),
        ({"generator": {"match": ["generator.*"], "optimizer": {"use": "adamw", "betta1": 0.5}, "loss": sum}},
         r"turns\.generator\.optimizer adamw has no setting 'betta1'"),
        ({"critic": {"match": ["*"]}}, r"no method critic_loss\(outputs, targets\)"),
        (None, "give a loss, or turns"),
    ],
)  # fmt: skip
def test_turns_of_a_script_that_are_none_are_refused(tmp_path: Path, turns: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Trainer.of(
            model=model_of(), optimizer="sgd", train=Pairs(), batch=2, folder=str(tmp_path), turns=turns
        )


@pytest.mark.parametrize("name", ["ema", "ema_fast", "x.y", "a b", "Critic"])
def test_a_turn_whose_numbers_would_have_another_s_name_is_refused(name: str) -> None:
    """`ema_loss` is the loss of averaged weights: it would take the place of the turn's."""
    with pytest.raises(RecipeError, match="is no name for a turn"):
        read_recipe(GAN, [f"turns={{'{name}': {{match: discriminator}}, generator: {{match: generator}}}}"])


def test_gradients_that_are_not_finite_are_named_though_a_later_turn_has_finite_ones() -> None:
    model = model_of()
    nan = paddle.to_tensor(np.nan)
    losses = (lambda x, y: (model.discriminator(y) * nan).sum(-1), lambda x, y: x.sum(-1))
    turns = [turn(name, loss, at, [name]) for at, (name, loss) in
             enumerate(zip(("discriminator", "generator"), losses, strict=True))]  # fmt: skip
    sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    learner = full_model_learner(Task(model=model, loss=TurnsLoss(turns), optimizer=sgd), Mesh.alone())
    data = paddle.ones([2, 3]), paddle.ones([2, 5])
    learner.train_batch(Batch((MicroBatch(*data, samples=2),), 2, 0, 0), collect_metrics=True)
    assert {name.split(".")[0] for name in learner.faulty_gradients} == {"discriminator"}
