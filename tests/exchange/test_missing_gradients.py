"""Experts that a gate leaves out on some rank, in some update or micro-batch, or everywhere: as on one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from paddle import nn

from paddle_dp.data import Loader
from paddle_dp.mesh import join
from paddle_dp.part import read_part
from paddle_dp.train.evaluate import evaluate
from tests.house.datasets import Arrays
from tests.house.learners import Chain, numbers_of, stored_weights, task_of
from tests.ranks import run_ranks

BATCH, WIDTH = 8, 6
# The expert that each sample of a batch goes to: all of them; one only on the last of two ranks; one nowhere; in one
# micro-batch of one rank; and a last batch of three samples.
ROUTES = [
    [0, 1, 2, 0, 1, 2, 0, 1],
    [0, 1, 0, 1, 0, 1, 0, 2],
    [0, 0, 1, 1, 1, 0, 1, 1],
    [2, 2, 0, 0, 0, 0, 1, 0],
    [1, 1, 2],
]
ADAMW = {"weight_decay": 0.1, "grad_clip": nn.ClipGradByGlobalNorm(0.5)}


class Experts(nn.Layer):
    """The first numbers of a sample choose its expert, a gate weighs it; nobody else is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.LayerList(
            [nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)) for _ in range(3)]
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        chosen, weights = x[:, :3].argmax(-1), F.softmax(self.gate(x))
        outputs = paddle.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = paddle.nonzero(chosen == number).flatten()
            if rows.size:
                outputs = paddle.scatter_nd_add(
                    outputs, rows.unsqueeze(1), expert(x[rows]) * weights[rows, number : number + 1]
                )
        return x + outputs


class Mixture(Chain):
    def __init__(self, norm: bool = False) -> None:
        # Without a bias, which has no true gradient before a BatchNorm.
        normed = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias_attr=False), nn.BatchNorm1D(WIDTH))
        super().__init__(
            Experts(), normed if norm else nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 3)
        )


def points() -> Arrays:
    routes = [expert for batch in ROUTES for expert in batch]
    x = np.random.RandomState(0).randn(len(routes), WIDTH).astype("float32")
    x[np.arange(len(routes)), routes] += 100  # whatever the layers before do to it
    return Arrays(x / 50, np.arange(len(routes)) % 3)


def learn(strategy: dict[str, Any], micro_batches: int = 1, norm: bool = False) -> dict[str, Any]:
    """An epoch in float64: [loss, gradient norm] of each step, the weights that lie here, and the held-out loss."""
    mesh = join(seed=1)
    task = task_of(Mixture(norm), None, "AdamW", 0.05, settings=ADAMW, dtype="float64")
    placer = read_part("strategies", strategy).build(mesh)
    learner, mesh = placer.place(task), placer.mesh
    loader = Loader.plain(points(), BATCH, mesh, micro_batches=micro_batches, shuffle=False)
    rows = numbers_of(learner, loader.read(0))
    learner.check("at the end")
    assert not learner.differences()  # which are looked for with forwards and backwards of its own
    held_out = evaluate(learner, Loader.plain(points(), BATCH, mesh, shuffle=False), mesh)
    return {"rows": rows, "weights": stored_weights(learner), "held_out": held_out.numbers["loss"]}


def learn_each(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [learn(**case) for case in cases]


def cases(*strategies: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"strategy": how, "micro_batches": n} for how in strategies for n in (1, 2)]


def hybrid(**axes: Any) -> dict[str, Any]:
    return {"use": "hybrid", **axes}


def normed(of: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**case, "norm": True} for case in of]


LENT, FOUND = hybrid(sharding=2, sharding_stage=3), {"use": "data_parallel", "find_unused_parameters": True}
TWO = [
    *cases(FOUND, hybrid(data=2), *(hybrid(sharding=2, sharding_stage=stage) for stage in (1, 2)), LENT),
    *normed(cases(*(hybrid(sharding=2, sharding_stage=stage, sync_batch_norm=True) for stage in (1, 3)))),
]
# An update of one micro-batch does what the last of two does: the exchanges that differ most show it.
QUICK = [case for case in TWO if case["micro_batches"] == 2 or case["strategy"] in (FOUND, LENT)]
FOUR = cases(
    *(hybrid(data=2, sharding=2, sharding_stage=stage) for stage in (1, 2, 3)),
    hybrid(data=2, pipeline=2),
    *(hybrid(pipeline=2, sharding=2, sharding_stage=stage) for stage in (2, 3)),
)


@pytest.fixture(scope="module")
def one() -> dict[tuple[bool, int], Any]:
    """With BatchNorm or without, by the number of micro-batches, what one process learns."""
    plain = cases({"use": "single"})
    found = run_ranks(learn_each, 1, [*plain, *normed(plain)])[0]
    return dict(zip([(False, 1), (False, 2), (True, 1), (True, 2)], found, strict=True))


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        pytest.param(2, QUICK, id="two"),
        pytest.param(2, [case for case in TWO if case not in QUICK], id="two more", marks=pytest.mark.long),
        pytest.param(4, FOUR, id="four", marks=pytest.mark.long),
    ],
)
def test_what_a_gate_leaves_out_is_one_process(one: Any, ranks: int, layouts: list[Any]) -> None:
    """Also with synchronized BatchNorm between experts: a rank that has none to compute comes to it before the others,
    and waits for those that do."""
    by_layout = zip(*run_ranks(learn_each, ranks, layouts, timeout=100), strict=True)
    for case, found in zip(layouts, by_layout, strict=True):
        norm = case.get("norm", False)
        # Paddle's own BatchNorm has its momentum in float32, so running statistics are off by 1e-8 of a step.
        held_out = 1e-9 if norm else 1e-12
        assert_one_process(found, one[norm, case["micro_batches"]], str(case), held_out)


def assert_one_process(ranks: Sequence[Any], truth: Any, case: str, held_out: float) -> None:
    stored = {}
    for found in ranks:
        np.testing.assert_allclose(found["rows"], truth["rows"], rtol=1e-12, err_msg=case)
        assert found["held_out"] == pytest.approx(truth["held_out"], rel=held_out)
        for name, weight in found["weights"].items():
            stored[name] = weight
            np.testing.assert_allclose(
                weight, truth["weights"][name], rtol=0, atol=1e-12, err_msg=f"{case} {name}"
            )
    assert set(stored) == set(truth["weights"])
