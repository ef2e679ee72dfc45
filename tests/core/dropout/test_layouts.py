"""Dropout is one process's dropout in every layout: losses and gradient norms of a few updates are the same numbers."""

from dataclasses import replace

import numpy as np
import paddle
import pytest

from models import bert, gpt, vit
from paddle_dp.data import Loader
from paddle_dp.mesh import join
from paddle_dp.part import read_part
from paddle_dp.train.evaluate import evaluate
from paddle_dp.units import Recompute
from tests.core.dropout.layers import CONFIG, dropping, loss, monte_carlo
from tests.house.learners import numbers_of, task_of
from tests.parity import train
from tests.ranks import run_ranks

SHAPE = {"vocab": 32, "width": 32, "depth": 3, "heads": 4, "length": 16, "dropout": 0.3}
IMAGE = {
    "image": 8, "patch": 2, "channels": 1, "classes": 5, "width": 32, "depth": 3, "heads": 4, "dropout": 0.3,
}  # fmt: skip
MODELS = {
    "everywhere": dropping,
    "gpt": lambda: gpt.Config(**SHAPE).build(),
    "bert": lambda: bert.Config(**SHAPE).build(),
    "vit": lambda: vit.Config(**IMAGE).build(),
}
ALONG = {"tensor": 2, "sequence_parallel": True}


def sample(name, i):
    random = np.random.RandomState(i)
    if name == "vit":
        return random.randn(1, 8, 8).astype("float32"), random.randint(5)
    text = random.randint(0, CONFIG.vocab, 17)
    return text[:-1], text[1:]


def learned(strategy, name, micro_batches, recompute="none"):
    """[[loss, gradient norm] of each update]: batches of 8, 8, 4, which no ranks share equally in 3 micro-batches."""
    paddle.seed(3)
    task = task_of(MODELS[name](), loss(), "AdamW", 0.01)
    config = replace(strategy.config, recompute=Recompute.parse(recompute))
    learner, mesh = replace(strategy, config=config).place(task), strategy.mesh
    paddle.seed(mesh.rank)  # nothing of what follows depends on it
    data = [sample(name, i) for i in range(20)]
    rows = numbers_of(learner, Loader.plain(data, 8, mesh, seed=5, micro_batches=micro_batches).read(1))
    assert learner.runner.draws.differences() == []
    return rows


def learn(cases):
    """The rows of every case (strategy's word, settings, model, micro-batches, recompute)."""
    mesh = join(seed=3)
    return [
        learned(read_part("strategies", {"use": use, **settings}).build(mesh), *how)
        for use, settings, *how in cases
    ]


def one_process(cases):
    names = sorted({case[2] for case in cases})
    found = dict(zip(names, learn([("single", {}, name, 1) for name in names]), strict=True))
    return [found[case[2]] for case in cases]


def check(ranks, cases):
    truth, found = one_process(cases), run_ranks(learn, ranks, cases, timeout=500)
    for case, ours, rows in zip(cases, truth, zip(*found, strict=True), strict=True):
        for rank in rows:
            np.testing.assert_allclose(rank, ours, rtol=2e-5, err_msg=str(case))


def test_micros_and_recompute_on_one_process_change_nothing():
    cases = [("single", {}, "everywhere", 3, how) for how in ("none", "full", "selective", "every 2 blocks")]
    for rows, ours in zip(learn(cases), one_process(cases), strict=True):
        np.testing.assert_allclose(rows, ours, rtol=2e-5)


TWO = [
    ("data_parallel", {}, "everywhere", 3),
    ("hybrid", {"sharding": 2, "sharding_stage": 3}, "everywhere", 3, "full"),
    ("hybrid", {"tensor": 2}, "everywhere", 3),
    ("hybrid", ALONG, "vit", 1, "full"),
    ("hybrid", {"sequence": 2}, "everywhere", 3, "selective"),
    ("hybrid", {"sequence": 2}, "bert", 1, "full"),
    ("hybrid", {"pipeline": 2, "pipeline_schedule": "interleaved"}, "everywhere", 4, "selective"),
]
MORE_OF_TWO = [
    ("data_parallel", {}, "vit", 1, "full"),
    ("hybrid", {"sharding": 2, "sharding_stage": 2}, "everywhere", 1),
    ("hybrid", ALONG, "everywhere", 1, "full"),
    ("hybrid", {"pipeline": 2}, "everywhere", 3, "full"),
    ("hybrid", {"pipeline": 2, "pipeline_schedule": "f_then_b"}, "gpt", 2),
]


@pytest.mark.parametrize(
    "cases", [TWO, pytest.param(MORE_OF_TWO, marks=pytest.mark.long)], ids=["some", "others"]
)
def test_two_ranks_in_every_layout(cases):
    check(2, cases)


def held_out(cases, batch):
    """The held-out loss of each case (strategy's word, settings), of a model that drops in evaluation, too."""
    mesh, losses = join(seed=3), []
    data = [sample("everywhere", i) for i in range(19)]
    for use, settings in cases:
        learner = (
            read_part("strategies", {"use": use, **settings})
            .build(mesh)
            .place(task_of(monte_carlo(), loss()))
        )
        loader = Loader.plain(data, batch, learner.mesh, seed=5, shuffle=False)
        paddle.seed(mesh.rank)  # nothing of what follows depends on it
        losses.append(evaluate(learner, loader, learner.mesh).numbers["loss"])
        paddle.rand([5])
        assert evaluate(learner, loader, learner.mesh).numbers["loss"] == losses[-1], "the same weights"
        assert learner.runner.draws.differences() == []
    return losses


HELD_OUT = [
    ("data_parallel", {}), ("hybrid", {"sharding": 2, "sharding_stage": 3}), ("hybrid", {"tensor": 2}),
    ("hybrid", ALONG), ("hybrid", {"sequence": 2}), ("hybrid", {"pipeline": 2, "pipeline_schedule": "interleaved"}),
]  # fmt: skip


def test_an_evaluation_that_drops_is_one_process_s_in_every_layout_and_held_out_batch():
    """F.dropout(x, 0.5) drops in evaluation, too: each rank drew from its generator, and other numbers each time."""
    (truth,) = held_out([("single", {})], 5)
    for losses in run_ranks(held_out, 2, HELD_OUT, 8, timeout=300):
        np.testing.assert_allclose(losses, truth, rtol=1e-5)


FOUR = [
    ("hybrid", {"tensor": 4}, "everywhere", 1, "full"),
    ("hybrid", {**ALONG, "pipeline": 2}, "everywhere", 3, "selective"),
    ("hybrid", {**ALONG, "sequence": 2}, "everywhere", 1),
    ("hybrid", {"tensor": 2, "sequence": 2}, "everywhere", 3, "full"),
    ("hybrid", {"sequence": 2, "pipeline": 2}, "everywhere", 2, "full"),
    ("hybrid", {"sharding": 2, "sharding_stage": 1}, "bert", 1),
    ("hybrid", {"tensor": 2, "sharding": 2, "sharding_stage": 2}, "everywhere", 1),
    ("hybrid", {"pipeline": 4}, "everywhere", 4, "full"),
]


@pytest.mark.long
def test_four_ranks_in_mixtures():
    check(4, FOUR)


def run(folder, ranks, until, resume, strategy):
    return run_ranks(
        train, ranks, str(folder), strategy, until, resume, model="gpt, dropout: 0.3", timeout=300
    )[0]


@pytest.mark.long
def test_two_readers_and_then_two_stages_are_one_process(tmp_path):
    whole = run(tmp_path / "whole", 1, "6 steps", False, "{use: single}")
    first = run(tmp_path / "parts", 2, "3 steps", False, "{use: data_parallel, recompute: full}")
    last = run(tmp_path / "parts", 2, "6 steps", True, "{use: hybrid, pipeline: 2, recompute: full}")
    np.testing.assert_allclose(first["rows"] + last["rows"], whole["rows"], rtol=2e-5)
    assert last["held_out"]["loss"] == pytest.approx(whole["held_out"]["loss"], rel=1e-5)
