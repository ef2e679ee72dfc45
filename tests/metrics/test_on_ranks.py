"""Metrics on several ranks with unequal shares, in every kind of layout: one process's scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.house.datasets import Samples
from tests.house.training import build_trainer
from tests.ranks import run_ranks

# Without auc and average_precision, for which each rank would import scikit-learn.
METRICS = [
    "classification",
    {"use": "top_k", "k": [2, 4]},
    {"use": "retrieval", "k": [1, 2]},
    "perplexity",
]
SAMPLES = 17


def row(i: int) -> tuple[np.ndarray, np.int64]:
    """Inputs that are the outputs: one-process numbers, bit by bit, on any ranks."""
    random = np.random.default_rng(i)
    return random.standard_normal(5).astype("float32"), np.int64(random.integers(5))


ROWS = Samples(SAMPLES, row)


def evaluated(folder: str) -> dict[str, float]:
    """In every rank: the held-out numbers of a model that returns its inputs."""
    import paddle
    from paddle import nn

    from paddle_dp import Trainer
    from paddle_dp.mesh import join

    class Same(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.create_parameter([1], default_initializer=nn.initializer.Constant(1.0))

        def forward(self, x: Any) -> Any:
            return x * self.one

    def order(outputs: Any, targets: Any) -> float:
        """Depends on the order of the samples, and on every bit."""
        return float((outputs[:, 0].astype("float64") * np.arange(len(outputs))).sum() + targets[-1])

    by_paddle = paddle.metric.Accuracy(topk=(1, 3), name="by_paddle")
    join(seed=3)
    paddle.seed(3)
    trainer = Trainer.of(
        model=Same(), train=ROWS, test=ROWS, batch=7, loss="cross_entropy", optimizer="sgd", folder=folder,
        metrics=[*METRICS, order, by_paddle], callbacks=[],
    )  # fmt: skip
    return dict(trainer.evaluate().numbers)


def test_unequal_shares_give_the_numbers_of_one_process_bit_by_bit(tmp_path: Path) -> None:
    (one,) = run_ranks(evaluated, 1, str(tmp_path / "1"))
    assert {"precision", "acc2", "recall_at_2", "perplexity", "order"} <= set(one)
    rows = [ROWS[i] for i in range(SAMPLES)]
    weighted = sum(float(np.float64(x[0])) * i for i, (x, _) in enumerate(rows)) + int(rows[-1][1])
    assert one["order"] == pytest.approx(weighted, rel=1e-12)
    assert one["by_paddle_top1"] == pytest.approx(one["acc1"], rel=1e-12)
    assert one["by_paddle_top3"] == sum(int(y) in x.argsort()[-3:] for x, y in rows) / SAMPLES
    own = set(one) - {"loss", "perplexity"}  # sums of float32 over shares
    for several in run_ranks(evaluated, 3, str(tmp_path / "3")):
        assert {name: several[name] for name in own} == {name: one[name] for name in own}
        assert several == pytest.approx(one, rel=1e-6)


RECIPES = {
    "classifier": """
model: {use: large_classifier, inputs: 6, hidden: [16], width: 8, classes: 24}
dataset: {use: random_identities, features: 6, classes: 24, seen: 12, samples: 30, test_samples: 11}
loss: {use: cross_entropy}
metrics: [{use: top_k, k: [2, 4]}, {use: classification}]
""",
    "gpt": """
model: {use: gpt, vocab: 32, width: 32, depth: 2, heads: 4, length: 16, tied: %s}
dataset: {use: random_tokens, vocab: 32, length: 16, samples: 30, test_samples: 11}
loss: {use: cross_entropy}
metrics: [{use: top_k, k: [2, 4]}, {use: classification}, {use: perplexity}]
""",
}
REST = """
optimizer: {{use: sgd}}
strategy: {strategy}
train: {{length: 1 steps, batch: 8, micro_batches: 2, seed: 3}}
callbacks: []
"""


def scored(folder: str, texts: dict[str, str]) -> dict[str, dict[str, float]]:
    """In every rank: the held-out numbers of each recipe with its initial weights."""
    return {name: dict(build_trainer(text, folder).evaluate().numbers) for name, text in texts.items()}


def recipes(strategy: str) -> dict[str, str]:
    tied = {"gpt": "false", "tied gpt": "true"}
    texts = {name: RECIPES["gpt"] % word for name, word in tied.items()} | {
        "classifier": RECIPES["classifier"]
    }
    return {name: text + REST.format(strategy=strategy) for name, text in texts.items()}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """One process's scores by each recipe."""
    (found,) = run_ranks(scored, 1, str(tmp_path_factory.mktemp("one")), recipes("{use: single}"))
    assert len(found["gpt"]) >= 8
    return found


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "{use: hybrid, tensor: 2}"),
        (2, "{use: hybrid, pipeline: 2}"),
        (2, "{use: hybrid, sequence: 2}"),
        pytest.param(4, "{use: hybrid, sequence: 2, tensor: 2}", marks=pytest.mark.long),
        pytest.param(4, "{use: hybrid, tensor: 2, data: 2}", marks=pytest.mark.long),
    ],
)
def test_every_layout_gives_the_scores_of_one_process(
    tmp_path: Path, ranks: int, strategy: str, one: dict[str, dict[str, float]]
) -> None:
    """Classes or tokens that a rank holds a part of are joined."""
    cut = recipes(strategy)
    names = ["gpt"] if "pipeline" in strategy else ["tied gpt"]
    if strategy == "{use: hybrid, tensor: 2}":
        names.append("classifier")
    for several in run_ranks(scored, ranks, str(tmp_path), {name: cut[name] for name in names}):
        for name in names:
            assert several[name] == pytest.approx(one[name], rel=1e-5), name


def one_rank_fails(folder: str) -> tuple[list[str], str]:
    """In every rank: the checkpoints and the error of a training whose metrics fail on the last rank's share alone."""
    from paddle import nn

    from paddle_dp import Trainer
    from paddle_dp.checkpoint import checkpoints
    from paddle_dp.errors import UsageError
    from paddle_dp.mesh import join

    mesh = join(seed=3)
    calls = []

    class Sums:
        names = ("total",)

        def sums(self, outputs: Any, targets: Any) -> dict[str, Any]:
            calls.append(mesh.rank)
            if mesh.is_main or len(calls) < 5:  # before the training one batch is tried, whole and in halves
                return {"sum": outputs.sum()}
            raise KeyError("no such label")

        def compute(self, sums: Any) -> dict[str, float]:
            return {"total": float(sums["sum"])}

    trainer = Trainer.of(
        model=nn.Linear(5, 5), train=ROWS, test=ROWS, batch=6, loss="cross_entropy", optimizer="sgd", folder=folder,
        length="2 epochs", callbacks=["evaluate", "checkpoint"], metrics=[Sums()],
    )  # fmt: skip
    try:
        trainer.fit()
    except UsageError as error:
        return [path.name for path in checkpoints(f"{folder}/checkpoints")], str(error)
    return [], ""


def test_a_metric_that_fails_on_one_rank_ends_all_of_them_after_a_checkpoint(tmp_path: Path) -> None:
    for saved, error in run_ranks(one_rank_fails, 2, str(tmp_path)):
        assert saved == ["step-00000003"]
        assert "Sums failed: KeyError: 'no such label'" in error
