"""Local SGD and DiLoCo on real ranks: what equals data parallelism, and what may not change the training."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.learner import Task
from paddle_dp.learner.update import WeightSync
from paddle_dp.mesh import Mesh
from paddle_dp.part import read_part
from paddle_dp.proof import SideRunner, compare_sides, verify
from paddle_dp.recipe import read_recipe
from paddle_dp.strategies._alone import place_alone
from paddle_dp.strategies._rounds.periodic_means import PeriodicMeans
from paddle_dp.units import Recompute
from paddle_dp.verbs.check_screen import forecast
from tests.house.datasets import Points
from tests.jobs import comparisons_in_forks
from tests.parity import assert_same_weights, weights
from tests.ranks import ROOT, run_ranks
from tests.strategies.local_runs import RECIPE, train, train_each, trainer

DATA = "strategy={use: data_parallel}"
ADAMW = ["optimizer={use: adamw}", "schedule.learning_rate=5e-3"]
MOMENTUM = ["optimizer={use: momentum}", "schedule.learning_rate=0.05"]


def local(*settings: str) -> str:
    return "strategy={use: local_sgd, " + ", ".join(settings) + "}"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([local("every: 8 steps")], "every 8 steps, each rank learns from its own samples alone"),
        ([local("every: 1 step"), *ADAMW], "adamw makes another step"),
        ([local("every: 1 step"), *MOMENTUM], "momentum makes another step"),
        ([local("every: 1 step"), "optimizer.clip=1.0"], "clips the gradient of its share"),
        ([local("every: 1 step", "outer: {use: momentum}")], "the outer optimizer makes other steps"),
        (["strategy={use: async_average}"], "not even that of the same command again"),
    ],
)
def test_verify_says_at_the_door_what_is_not_promised(recipe, words, why):
    with pytest.raises(UsageError, match=why):
        verify(recipe, words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["train.precision=float16"], "agree on a loss scale"),
        (["train.precision={dtype: bfloat16, level: O2}"], "weights of 16 bits"),
        (["ema={decay: 0.9}"], "ema averages weights"),
        (["guard={recompute: 5 steps}"], "guard.recompute compares"),
        (["strategy={use: async_average}", "guard={non_finite: skip}"], "judge each update together"),
    ],
)
def test_what_all_ranks_decide_together_is_refused(recipe, words, why):
    asked = read_recipe(recipe, words)
    with pytest.raises(UsageError, match=why):
        asked.strategy.refuse(asked, 2, "cpu")


def test_a_loss_over_the_samples_of_all_ranks_is_refused():
    task = SimpleNamespace(loss=SimpleNamespace(compares="ranks"))
    with pytest.raises(UsageError, match=r"learns alone: set loss\.across=rank"):
        place_alone(task, SimpleNamespace(ranks=2), Recompute(), WeightSync, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("setting", ["every: 1 epoch", "warmup: 2 epochs"])
def test_periods_are_steps(recipe, setting):
    with pytest.raises(RecipeError, match=r"is not a quantity like .* \(units: step, steps\)"):
        read_recipe(recipe, [local(setting)])


def run(tmp_path, ranks: int, *cases: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """What every rank has found, by case."""
    given = [{"folder": str(tmp_path / str(number)), **case} for number, case in enumerate(cases)]
    of_ranks = run_ranks(train_each, ranks, given, timeout=300)
    return [[of_rank[number] for of_rank in of_ranks] for number in range(len(cases))]


def assert_equal(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Bit by bit, on every rank, weights and optimizer's states included."""
    for one, other in zip(ones, others, strict=True):
        assert one["own"] == other["own"]
        assert one["rows"][-1] == other["rows"][-1]
        assert one["held_out"] == other["held_out"]
    assert_same_weights(ones[0]["saved"], others[0]["saved"])


def assert_near(ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_allclose(one["rows"], other["rows"], rtol=2e-5)
        assert one["held_out"] == pytest.approx(other["held_out"], rel=1e-5)


def test_every_step_is_data_parallel_and_a_warm_up_is_it_to_the_bit(tmp_path):
    """25 samples in two micro-batches are no equal shares."""
    data, every, warm, warm_data = run(
        tmp_path, 2,
        {"words": [DATA], "until": "5 steps"},
        {"words": [local("every: 1 step")], "until": "5 steps"},
        {"words": [local("every: 2 steps", "warmup: 3 steps"), *ADAMW], "until": "3 steps"},
        {"words": [DATA, *ADAMW], "until": "3 steps"},
    )  # fmt: skip
    assert_near(every, data)
    assert_equal(warm, warm_data)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_step_is_data_parallel_on_any_number_of_ranks(tmp_path, ranks):
    states = "optimizer_states: averaged"
    data, every, momentum, averaged = run(
        tmp_path, ranks,
        {"words": [DATA]}, {"words": [local("every: 1 step")]},
        {"words": [DATA, *MOMENTUM]}, {"words": [local("every: 1 step", states), *MOMENTUM]},
    )  # fmt: skip
    assert_near(every, data)
    assert_near(averaged, momentum)


LAYOUTS = {
    "plain": [local("every: 5 steps", "warmup: 6 steps"), *MOMENTUM],
    "averaged": [local("every: 5 steps", "optimizer_states: averaged"), *ADAMW],
    "diloco": [local("every: 5 steps", "warmup: 2 steps", "outer: {use: momentum}"), *ADAMW],
    "adaptive": [local("every: 3 steps", "adaptive: true"), *ADAMW],
    "still warm": [local("every: 1 step", "adaptive: true", "warmup: 15 steps"), *ADAMW],
}


@pytest.mark.long
@pytest.mark.parametrize("words", LAYOUTS.values(), ids=LAYOUTS)
def test_looks_and_saves_change_nothing_and_a_resume_is_bit_equal(tmp_path, words):
    """Saved in the midst of a period, where every rank has weights of its own."""
    resumed = str(tmp_path / "0" / "between" / "step-00000013")
    looked, plain, again, other = run(
        tmp_path, 2,
        {"words": words, "evaluate_at": 9, "save_at": 13},
        {"words": words},
        {"words": words, "resume": resumed},
        {"words": [DATA, words[1], words[2]], "resume": resumed, "until": "14 steps"},
    )  # fmt: skip
    assert looked[0]["between"] == resumed
    assert looked[0]["on_the_way"] == looked[1]["on_the_way"] != looked[0]["held_out"]
    assert_equal(looked, plain)
    assert_equal(again, plain)
    assert len({found["own"] for found in plain}) == 1, "at the end all ranks have the same weights"
    assert len(other[0]["rows"]) == 1, "data_parallel goes on from the mean"


@pytest.mark.long
@pytest.mark.parametrize("save_at", [13, 14])
def test_a_resume_in_the_midst_of_a_period_keeps_each_rank_s_own_buffers(tmp_path, save_at):
    """A model whose forward reads a centre that it moves by its own rank's samples; batches of a BatchNorm besides."""
    words = [local("every: 5 steps"), "model={use: tests.strategies.drifting.Drifting}", *MOMENTUM]
    resumed = str(tmp_path / "0" / "between" / f"step-{save_at:08}")
    saved, again = run(
        tmp_path, 2,
        {"words": words, "save_at": save_at},
        {"words": words, "resume": resumed},
    )  # fmt: skip
    assert saved[0]["between"] == resumed
    assert_equal(again, saved)


@pytest.mark.long
@pytest.mark.parametrize("save_at", [13, 15])
def test_a_longer_warm_up_goes_on_from_the_mean_as_data_parallel_does(tmp_path, save_at):
    """In the midst of a period, where weights differ, and at its end, where states do."""
    own = local("every: 5 steps")
    resumed = str(tmp_path / "0" / "between" / f"step-{save_at:08}")
    longer = local("every: 5 steps", "warmup: 18 steps")
    _, warm, data, on = run(
        tmp_path, 2,
        {"words": [own, *MOMENTUM], "save_at": save_at},
        {"words": [longer, *MOMENTUM], "resume": resumed, "until": "18 steps"},
        {"words": [DATA, *MOMENTUM], "resume": resumed, "until": "18 steps"},
        {"words": [longer, *MOMENTUM], "resume": resumed},
    )  # fmt: skip
    assert_near(warm, data)
    assert warm[0]["own"] == warm[1]["own"] and on[0]["own"] == on[1]["own"]
    assert on[0]["rows"][: 18 - save_at] == warm[0]["rows"]


class Saved:
    """In the midst of a period, of a model of which `frozen` was not trained: all numbers are 7."""

    def __init__(self, trained: Sequence[str]):
        self.shared = {"periods", *(f"start/{name}" for name in trained)}
        self.local = {"counts", *(f"weight/{name}" for name in trained)}

    def shared_into(self, name: str, tensor: Any) -> None:
        assert name in self.shared
        tensor.fill_(7.0)

    def local_into(self, name: str, tensor: Any) -> None:
        assert name in self.local
        tensor.fill_(7.0)


@pytest.mark.parametrize(("frozen", "outer"), [([], False), ([], True), (["0.bias"], False)])
def test_what_was_frozen_in_the_midst_of_a_period_goes_on_from_the_mean(frozen, outer):
    model = nn.Linear(2, 2)
    task = Task(
        model=nn.Sequential(model),
        loss=nn.CrossEntropyLoss(reduction="none"),
        optimizer=paddle.optimizer.SGD(0.1, parameters=model.parameters()),
    )
    settings = {"use": "local_sgd", "outer": {"use": "momentum"}} if outer else {"use": "local_sgd"}
    learner = read_part("strategies", settings).build(Mesh.alone()).place(task)
    saved = Saved([name for name in ("0.weight", "0.bias") if name not in frozen])
    learner.load_extra_state(saved)
    assert bool((model.weight == 7.0).all()) is (not frozen)
    if not frozen:  # a guard that goes back leaves out the next batch: a checkpoint follows without an update
        again, names = learner.extra_state(), saved.shared | saved.local  # with an outer optimizer, too
        tensors = {**again.shared, **again.local}
        assert all(bool((tensors[name] == 7.0).all()) for name in names)


def test_an_outer_step_begins_at_weights_that_a_script_has_set_between_two_fits(tmp_path):
    """It began at the weights of the first fit's end, and took a part of the change back, silently."""
    model = nn.Linear(6, 4)
    trainer = Trainer.of(
        model=model, loss="cross_entropy", optimizer=paddle.optimizer.SGD(0.0, parameters=model.parameters()),
        train=Points(32), batch=8, folder=tmp_path, callbacks=[],
        strategy={"use": "local_sgd", "every": "2 steps", "outer": {"learning_rate": 0.5, "momentum": 0.0}},
    )  # fmt: skip
    trainer.fit("2 steps")
    model.weight.set_value(paddle.full_like(model.weight, 7.0))
    trainer.fit("4 steps")
    assert bool((model.weight == 7.0).all()), model.weight


def check_again(folder: str, words: list[str], resume: str) -> None:
    trainer(folder, words, resume).check("before a step")


@pytest.mark.long
def test_weights_in_the_midst_of_a_period_may_differ_before_the_next_step_too(tmp_path):
    """As where a training goes back, and leaves the next batch out; plain descent has no states that would differ."""
    words = [local("every: 5 steps")]
    run(tmp_path, 2, {"words": words, "until": "4 steps", "save_at": 3})
    run_ranks(check_again, 2, str(tmp_path / "1"), words, str(tmp_path / "0" / "between" / "step-00000003"))


@pytest.mark.long
def test_no_setting_is_named_that_the_strategy_has_not(tmp_path):
    """What makes the same of a BatchNorm over one rank's samples as on one process."""
    norms = [
        "model={use: convnet, channels: 1, widths: [4], classes: 10, norm: batch}",
        "dataset.as_image=true",
    ]
    cases = [{"words": [words, *norms], "until": "1 step"} for words in (local("every: 2 steps"), DATA)]
    said = [found[0]["differences"] for found in run(tmp_path, 2, *cases)]
    alone, together = ([s for s in sentences if "BatchNorm" in s] for sentences in said)
    assert "sync_batch_norm=true" in together[0]
    assert "do not meet in a forward" in alone[0] and "sync_batch_norm=" not in alone[0]


@pytest.mark.long
@pytest.mark.parametrize("states", ["local", "averaged"])
def test_a_rank_that_never_had_a_sample_lacks_no_states(tmp_path, states):
    """In batches of one sample it is the first rank, whose states a checkpoint saves for all."""
    single = ["train.batch=1", "train.micro_batches=1"]
    words = [local("every: 4 steps", f"optimizer_states: {states}"), *ADAMW, *single]
    every = [local("every: 1 step", "optimizer_states: averaged"), *MOMENTUM, *single]
    whole, again, data, averaged = run(
        tmp_path, 2,
        {"words": words, "until": "9 steps", "save_at": 6},
        {"words": words, "until": "9 steps", "resume": str(tmp_path / "0" / "between" / "step-00000006")},
        {"words": [DATA, *MOMENTUM, *single], "until": "6 steps"},
        {"words": every, "until": "6 steps"},
    )  # fmt: skip
    assert_equal(again, whole)
    assert_near(averaged, data)
    ours, theirs = weights(averaged[0]["saved"]), weights(data[0]["saved"])
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6, err_msg=name)


@pytest.mark.long
def test_a_checkpoint_goes_from_any_strategy_to_any_other(tmp_path):
    words = {
        "data": [DATA, *ADAMW],
        "local": [local("every: 5 steps", "outer: {use: momentum}"), *ADAMW],
        "async": ["strategy={use: async_average}", *ADAMW],
        "sharded": ["strategy={use: hybrid, sharding: 2}", *ADAMW],
    }
    first = run(
        tmp_path / "first", 2, *[{"words": w, "save_at": 7, "until": "8 steps"} for w in words.values()]
    )
    cases = [
        {"words": to, "resume": found[0]["between"], "until": "8 steps"}
        for found in first
        for name, to in words.items()
    ]
    for found in run(tmp_path / "then", 2, *cases):
        assert len(found[0]["rows"]) == 1
        assert found[0]["own"] == found[1]["own"]


def unweighted() -> None:
    """A fault: ranks count as much as each other, whatever their shares."""
    PeriodicMeans._take_portion = lambda self: None  # type: ignore[method-assign]


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_verify_finds_every_step_the_same_and_a_wrong_weight_different(tmp_path, recipe, ranks):
    words = (local("every: 1 step"), "train.micro_batches=1")
    runner = SideRunner(recipe, words, 4, ranks, tmp_path / "scratch")
    with comparisons_in_forks():
        good = runner.run_candidate(ranks)
        bad = runner.run_candidate(ranks, name="bad", patch=f"{__name__}:unweighted")
        one = runner.run_reference([good, bad])
    assert compare_sides(one, good).same
    assert not compare_sides(one, bad).same


def test_the_recipes_of_the_family_are_read():
    for name in ("digits_local_sgd", "digits_diloco", "digits_async_average"):
        asked = read_recipe(ROOT / "configs" / f"{name}.yaml")
        asked.strategy.refuse(asked, 2, "cpu")


def test_check_counts_the_copies_and_the_bytes(recipe):
    """1210 weights on four ranks; one copy of where a period began, another one for the velocity."""
    said = {
        words: "\n".join(forecast(read_recipe(recipe, [words]), 4))
        for words in (local("every: 8 steps"), local("every: 8 steps", "outer: {use: momentum}"), DATA)
    }
    plain, diloco, data = said.values()
    assert "copies" not in data and "a step sends 7.26 kB: data 7.26 kB of gradients" in data
    assert "copies of the weights 4.84 kB" in plain and "copies of the weights 9.68 kB" in diloco
    assert "a step sends 908 bytes: data 908 bytes of parameters" in plain


def test_what_a_resume_takes_is_not_said_to_be_left_out(tmp_path, capsys):
    """It was: of a strategy's own checkpoint, on as many ranks, that it had gone on from to the bit."""
    words = ["strategy={use: local_sgd, every: 8 steps, outer: {use: momentum}}"]
    saved = train(str(tmp_path / "a"), words, "11 steps")["saved"]
    capsys.readouterr()
    train(str(tmp_path / "b"), words, "12 steps", resume=saved)
    assert "left out" not in capsys.readouterr().err
    train(str(tmp_path / "c"), ["strategy={use: single}"], "12 steps", resume=saved)
    assert "(counts, periods, velocity): it is left out." in capsys.readouterr().err
