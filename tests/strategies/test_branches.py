"""Branches on ranks of their own learn what one process learns; a table that says something else is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.axes.meta_init import describe_weights
from paddle_dp.core.data_group import PaddleGroup
from paddle_dp.core.placement import Placement, Placements
from paddle_dp.errors import RecipeError, UsageError
from paddle_dp.mesh.transport import traffic
from paddle_dp.part import lazily, read_part
from paddle_dp.plan.exchange import mean_bytes
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.strategies.branches import Config
from paddle_dp.strategies.branches.branch_exchange import BranchExchange
from paddle_dp.strategies.branches.branch_trace import observed, tables_of
from paddle_dp.strategies.branches.branched_model import Branched, assign, branched
from paddle_dp.verbs.forecast import layout_of
from tests.house.recipes import small_recipe
from tests.house.training import build_trainer, trained
from tests.parity import assert_same
from tests.ranks import run_ranks
from tests.sim.build import built, why_not

ALONE = BranchExchange(PaddleGroup([0], 0, None))


class Paths(nn.Layer):
    """Three paths from one input, which meet in a sum; `wide` is two layers."""

    branches = (("narrow",), ("wide1", "wide2"), ("norm",))

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.norm = nn.Linear(6, 6), nn.BatchNorm1D(6)
        self.wide1, self.wide2 = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x: Any) -> Any:
        return nn.functional.tanh(self.narrow(x) + self.wide2(self.wide1(x)) + self.norm(x))


class Deep(nn.Layer):
    """Layers before, between and behind two joins; `use: tests.strategies.test_branches.Deep`."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(64, 6), nn.Linear(6, 10)
        self.paths = nn.LayerList([Paths(), Paths()])
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Any) -> Any:
        x = self.begin(x)
        for paths in self.paths:
            x = self.drop(paths(x))
        return self.end(x)


class Crossed(nn.Layer):
    """Two joins that do not depend on each other, of which backward reaches the first first on one rank, and the second
    first on the other: what each branch costs and how many layers it has go against each other. And a third, of inputs
    without a gradient, whose only branches that learn are on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = nn.Linear(64, 6), nn.Linear(10, 10)
        self.raw = Sum(nn.Linear(64, 6), Frozen(64, 6))
        self.joins = nn.LayerList([Sum(nn.Linear(6, 4), _deep(2)), Sum(_deep(5), nn.Linear(6, 4))])

    def forward(self, x: Any) -> Any:
        y = self.begin(x) + self.raw(x)
        return self.end(paddle.concat([self.joins[0](y), self.joins[1](2 * y), y[:, :2]], 1))


class Sum(nn.Layer):
    branches = (("one",), ("other",))

    def __init__(self, one: nn.Layer, other: nn.Layer) -> None:
        super().__init__()
        self.one, self.other = one, other

    def forward(self, x: Any) -> Any:
        return self.one(x) + self.other(x)


class TwoSides(nn.Layer):
    """Its inputs have names, and one is a flag."""

    branches = (("one",), ("other",))

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, left: Any, right: Any, apart: bool = False) -> Any:
        return (self.one(left) - self.other(right)).abs() if apart else self.one(left) + self.other(right)


class Compared(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.sides = nn.Linear(6, 6), TwoSides()

    def forward(self, left: Any, right: Any) -> Any:
        return self.sides(self.begin(left), apart=True, right=self.begin(right))


class Frozen(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        for parameter in self.parameters():
            parameter.stop_gradient = True


def _deep(width: int) -> nn.Layer:
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4)
    )


class Three(nn.Layer):
    """One tower for two of three branches, which are on ranks of their own."""

    branches = (("tower",), ("tower",), ("other",))

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.other = nn.Linear(6, 10), nn.Linear(6, 10)

    def forward(self, x: Any, y: Any) -> Any:
        return self.tower(x) - self.tower(y) + self.other(x)


class OfThree(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.begin, self.three = nn.Linear(64, 6), Three()

    def forward(self, x: Any) -> Any:
        x = self.begin(x)
        return self.three(x, x.tanh())


def samples(width: int = 6) -> Any:
    return paddle.to_tensor(np.random.RandomState(0).randn(2, width).astype("float32"))


def place(model: nn.Layer, width: int = 6) -> Branched:
    return branched(model, lambda: samples(width), ALONE, Placements(), compare=True)


@pytest.mark.parametrize("model", [TwoSides, Compared])
def test_a_layer_s_inputs_may_have_names(model: type[nn.Layer]) -> None:
    """As those of a data set whose samples are dicts, in any order, and as a layer's own settings."""
    paddle.seed(0)
    placed, alone = model(), model()
    alone.set_state_dict(placed.state_dict())
    both = {"right": samples(), "left": 2 * samples()}
    branched(placed, lambda: both, ALONE, Placements(), compare=True)
    for each in (placed, alone):
        each(**both).square().sum().backward()
    for mine, its in zip(placed.parameters(), alone.parameters(), strict=True):
        np.testing.assert_array_equal(mine.grad.numpy(), its.grad.numpy())


def test_the_model_with_branches_of_the_page_has_them() -> None:
    page = (Path(__file__).parents[2] / "docs/add-a-part.md").read_text()
    (code,) = re.findall(r"```python\n# mine/towers.py\n(.*?)```", page, re.S)
    space: dict[str, Any] = {}
    exec(code, space)
    pair = (samples(64), samples(64))
    found, _ = observed(space["Towers"](), pair)
    assert [seen.chains for seen in found] == [(("left", "left_head"), ("right", "right_head"))]
    branched(space["Towers"](), lambda: pair, ALONE, Placements(), compare=True)


def test_the_largest_branches_are_dealt_first_and_every_rank_gets_the_same_deal() -> None:
    assert assign([1.0, 8.0, 5.0, 4.0], 2) == [0, 0, 1, 1]
    assert assign([3.0, 3.0], 2) == [0, 1]
    assert assign([1.0], 3) == [0]


def test_on_one_rank_outputs_and_gradients_are_those_of_the_model_itself() -> None:
    paddle.seed(1)
    model, x = Deep(), samples(64)
    model.eval()
    x.stop_gradient = False
    wanted = model(x)
    wanted.sum().backward()
    truth = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    of_x = x.grad.numpy()
    model.clear_gradients()
    x.clear_grad()
    assert place(model, 64) == Branched(shared=(), exchanges_back=True)
    found = model(x)
    np.testing.assert_array_equal(found.numpy(), wanted.numpy())
    found.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), of_x, rtol=1e-5, atol=1e-7)
    for name, p in model.named_parameters():
        if name in truth:
            np.testing.assert_allclose(p.grad.numpy(), truth[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_tables_within_a_branch_are_the_branch_s_own_affair() -> None:
    class Outer(nn.Layer):
        branches = (("inner",), ("other",))

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = Paths(), nn.Linear(6, 6)

    assert list(tables_of(nn.Sequential(Outer(), Paths()))) == ["0", "1"]


def test_a_placement_counts_once_where_a_branch_is() -> None:
    at = {"data": 0, "sequence": 0, "sharding": 0}
    branch = Placement(only_at=1)
    assert [branch.is_main_replica({**at, "tensor": rank}) for rank in (0, 1)] == [False, True]


class Wrong(Paths):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.drop = kind, nn.Dropout(0.5)
        self.branches = {
            "order": (("narrow",), ("wide2", "wide1")),
            "unknown": (("narow",), ("norm",)),
            "between": (("narrow",), ("wide1", "wide2")),
            "twice": (("narrow",), ("norm",)),
            "drop": (("narrow",), ("drop",)),
        }[kind]

    def forward(self, x: Any) -> Any:
        wide = self.wide1(x)
        wide = self.wide2(wide + 1 if self.kind == "between" else wide)
        again = self.narrow(x) if self.kind == "twice" else 0
        return self.narrow(x) + wide + self.norm(x) + self.drop(x) + again


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("order", r"branch 1 of the model is wide2 → wide1, and wide2 is not called with an input"),
        ("unknown", r"the model has no layer 'narow'"),
        ("between", r"wide2 is not called with the output of wide1 alone"),
        ("twice", r"the model calls narrow more often than its table names it"),
        ("drop", r"drop drops, and it is in a branch"),
    ],
)
def test_a_table_that_says_something_else_is_refused(kind: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        place(Wrong(kind))


class Tied(nn.Layer):
    branches = (("one",), ("other",))

    def __init__(self, shared_norm: bool) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.BatchNorm1D(6)) if shared_norm else nn.Linear(6, 6)
        self.other = self.one if shared_norm else nn.Linear(6, 6)
        if not shared_norm:
            self.outside = self.other.weight

    def forward(self, x: Any) -> Any:
        return self.one(x) + self.other(x) + (x @ self.outside if hasattr(self, "outside") else 0)


def test_a_weight_in_a_branch_and_outside_is_refused() -> None:
    with pytest.raises(UsageError, match=r"in a branch and also elsewhere"):
        place(Tied(shared_norm=False))


def test_a_recipe_s_table_names_layers_that_there_are() -> None:
    model = {"use": "paddle.vision.models.inception_v3", "num_classes": 10}
    with pytest.raises(RecipeError, match=r"no layer is called 'inception_block_list\.0\.branch'"):
        read_part("models", {**model, "branches": {"inception_block_list.0": [["branch"]]}}).build()


def test_ranks_that_over_does_not_divide_are_refused() -> None:
    for ranks, least in ((1, 2), (3, 4)):
        with pytest.raises(
            UsageError, match=rf"has {ranks}: start it with --ranks {least}, or another multiple of 2"
        ):
            Config(over=2)._check(ranks)
    with pytest.raises(
        UsageError, match=r"are 6 ranks, and this job has 2: start it with --ranks 6, or leave"
    ):
        Config(over=2, data=3)._check(2)


TRAIN = "length: 8 steps, batch: 11, micro_batches: 2, seed: 3"
MOMENTUM = {"optimizer": "momentum, momentum: 0.9, clip: 0.5", "schedule": "constant, learning_rate: 0.01"}
DEEP = {"model": "tests.strategies.test_branches.Deep", "dataset": "digits", "loss": "cross_entropy"}
PAIRS = {"model": "siamese", "dataset": "digit_pairs, pairs: 200", "loss": "siamese"}
APART = {**PAIRS, "model": "siamese, shared: false"}
CROSSED = {**DEEP, "model": "tests.strategies.test_branches.Crossed"}
THREE = {**DEEP, "model": "tests.strategies.test_branches.OfThree"}


def recipe(strategy: str, parts: dict[str, str]) -> str:
    return small_recipe(TRAIN, strategy=strategy, callbacks="[]", **MOMENTUM, **parts)


TWO = (2, "{use: branches, over: 2, sync_batch_norm: true}")
FOUR = (4, "{use: branches, over: 2, sync_batch_norm: true}")


def test_a_recipe_s_model_is_built_once_to_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe(TWO[1], DEEP))
    models, build = list[nn.Layer](), Recipe.build_model
    monkeypatch.setattr(Recipe, "build_model", lambda self: models.append(build(self)) or models[-1])
    layout_of(read_recipe(tmp_path / "recipe.yaml", ["train.device=cpu"]), 2)
    assert len(models) == 1


CASES = [
    pytest.param(*place, parts, id=f"{name}, {place[0]} ranks")
    for name, parts, places in [
        ("deep", DEEP, [TWO, FOUR, (3, "{use: branches, over: 3}")]),
        ("shared", PAIRS, [TWO, FOUR]),
        ("apart", APART, [TWO, FOUR]),
        ("crossed", CROSSED, [TWO, FOUR]),
        ("two of three share", THREE, [(3, "{use: branches, over: 3}")]),
    ]
    for place in places
]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "strategy", "parts"), CASES)
def test_branches_learn_what_one_process_learns(tmp_path, ranks, strategy, parts) -> None:
    assert_one_process(tmp_path, ranks, strategy, parts)


def assert_one_process(tmp_path: Path, ranks: int, strategy: str, parts: dict[str, str]) -> Any:
    """Compares with one process; returns what the ranks found."""
    (one,) = run_ranks(trained, 1, recipe("{use: single}", parts), str(tmp_path / "one"))
    many = run_ranks(trained, ranks, recipe(strategy, parts), str(tmp_path / "many"), timeout=200)
    assert_same(many, one, 2e-5, 1e-4)
    if parts is not PAIRS:
        assert any(set(found["names"]) < set(one["names"]) for found in many)
    return many


def counted(out: str, strategy: str, parts: dict[str, str]) -> dict[str, float]:
    """In every rank: the bytes that it sends in a step, and the numbers of its weights."""
    trainer = build_trainer(recipe(strategy, parts), out, "train.batch=12")
    train_batch, sent = trainer.learner.train_batch, []

    def count(*given: Any) -> Any:
        before = traffic.sent
        found = train_batch(*given)
        sent.append(traffic.sent - before)
        return found

    trainer.learner.train_batch = count
    trainer.fit("6 steps")
    weights_here = sum(int(p.size) for p in trainer.learner.model.parameters())
    return {"sent": float(np.median(sent)), "weights": weights_here}


@pytest.mark.long
@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize(
    ("place", "parts"), [(TWO, DEEP), (FOUR, APART), (TWO, PAIRS)], ids=["deep", "apart", "shared"]
)
def test_check_counts_what_a_rank_holds_and_sends(tmp_path, place, parts, on_device, monkeypatch) -> None:
    if on_device:
        if reason := why_not():
            pytest.skip(reason)
        monkeypatch.setenv("CUSTOM_DEVICE_ROOT", str(built()))
    ranks, strategy = place
    (tmp_path / "recipe.yaml").write_text(recipe(strategy, parts))
    read = read_recipe(tmp_path / "recipe.yaml", ["train.batch=12"])
    with lazily():
        weights = describe_weights(read.build_model())
    layout, blocks = read.strategy.config.assigned(read, layout_of(read, ranks), weights, 4)
    many = run_ranks(counted, ranks, str(tmp_path), strategy, parts)
    assert [found["weights"] for found in many] == [
        layout.memory(blocks, rank).parameters for rank in range(ranks)
    ]
    sent = np.mean([found["sent"] for found in many])
    planned = mean_bytes(blocks, layout, 2, None)
    # Beside that a step sends a few numbers, such as norms.
    assert planned <= sent <= planned + 300


@pytest.mark.long
def test_a_resume_has_the_same_bits_and_any_strategy_goes_on(tmp_path) -> None:
    deep, folder = recipe(TWO[1], DEEP), str(tmp_path / "parts")
    whole = run_ranks(trained, 2, deep, str(tmp_path / "whole"))
    begun = run_ranks(trained, 2, deep, folder, until="3 steps")
    again = run_ranks(trained, 2, deep, folder, until="6 steps", resume=True)
    assert begun[0]["rows"] + again[0]["rows"] == whole[0]["rows"][:6]
    data = recipe("{use: data_parallel, sync_batch_norm: true}", DEEP)
    last = run_ranks(trained, 2, data, folder, resume=True)
    np.testing.assert_allclose(last[0]["rows"], whole[0]["rows"][6:], rtol=2e-5)
