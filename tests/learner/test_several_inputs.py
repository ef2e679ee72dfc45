"""Samples of several inputs, and of several targets, in layouts against one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.mesh import join
from tests.house.training import untried
from tests.ranks import run_ranks

BATCH = 8  # of 30 samples, in 2 micro-batches: unequal shares


class Answers:
    """A dict of a vector and of words, or a tuple of both; two targets."""

    def __init__(self, kind: str, samples: int = 30):
        draw = np.random.RandomState(0)
        self.vector = draw.randn(samples, 4).astype("float32")
        self.words = draw.randint(0, 7, (samples, 3))
        self.sum, self.kind = self.vector.sum(1), kind

    def __len__(self) -> int:
        return len(self.vector)

    def __getitem__(self, i: int) -> Any:
        both = {"words": self.words[i], "vector": self.vector[i]}
        inputs = both if self.kind == "dict" else ((both["vector"], both["words"]), np.float32(1))
        return inputs, {"positive": np.int64(self.sum[i] > 0), "sum": self.sum[i]}


class Reads(nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.of_vector, self.of_words = nn.Linear(4, 8), nn.Embedding(7, 8)

    def forward(self, vector: Any, words: Any = None) -> paddle.Tensor:
        if isinstance(vector, (tuple, list)):
            (vector, words), scale = vector, words
            vector = vector * scale.unsqueeze(1)
        return nn.functional.gelu(self.of_vector(vector) + self.of_words(words).mean(1))


class Net(nn.Layer):
    """A score for each of two targets: classes in columns 0 and 1, a number in column 2."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.LayerList([Reads(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3)])

    def forward(self, vector: Any, words: Any = None) -> paddle.Tensor:
        x = self.blocks[0](vector, words)
        for block in list(self.blocks)[1:]:
            x = block(x)
        return x


def loss(outputs: paddle.Tensor, targets: dict[str, paddle.Tensor]) -> paddle.Tensor:
    classes = nn.functional.cross_entropy(outputs[:, :2], targets["positive"], reduction="none")
    return classes.reshape([-1]) + (outputs[:, 2] - targets["sum"]) ** 2


def train(folder: str, cases: list[tuple[str, dict[str, Any]]], workers: int = 0) -> list[Any]:
    """[loss, norm] of every step and the held-out loss, for each (kind, strategy), one after another in the same ranks;
    the first two are tried before."""
    found = []
    for place, (kind, strategy) in enumerate(cases):
        if place > 1:
            untried()
        mesh = join(seed=0)
        paddle.seed(0)
        model = Net()
        trainer = Trainer.of(
            model=model, loss=loss, strategy=strategy, batch=BATCH, micro_batches=2,
            optimizer=paddle.optimizer.AdamW(1e-2, parameters=model.parameters()),
            train=Answers(kind), test=Answers(kind, 10), callbacks=[], folder=f"{folder}/{place}",
            loader={"num_workers": workers},
        )  # fmt: skip
        rows, learn = [], trainer.learner.train_batch

        def learned(batch: Any, *given: Any, rows=rows, learn=learn, **named: Any) -> Any:
            metrics = learn(batch, collect_metrics=True)
            rows.append([metrics["loss"], metrics["gradient_norm"]])
            return metrics

        trainer.learner.train_batch = learned
        trainer.fit("2 epochs")
        found.append([rows, trainer.evaluate().numbers["loss"], mesh.ranks])
    return found


DATA, STAGES = {"use": "data_parallel"}, {"use": "hybrid", "pipeline": 2}
SHARDS = {"use": "hybrid", "sharding": 2, "sharding_stage": 3}


KINDS = ["dict", "nested tuple"]
SOME = [("dict", DATA), ("nested tuple", STAGES), ("dict", SHARDS)]  # stages alone send inputs on
OTHERS = [("dict", STAGES), ("nested tuple", DATA), ("nested tuple", SHARDS)]


@pytest.mark.parametrize(
    "cases", [SOME, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["some", "others"]
)
def test_layouts_are_one_process(cases: list[tuple[str, dict[str, Any]]], tmp_path) -> None:
    alone = run_ranks(train, 1, str(tmp_path / "one"), [(kind, {"use": "single"}) for kind in KINDS])[0]
    for of_rank in run_ranks(train, 2, str(tmp_path / "two"), cases, 1):
        for (kind, _), (rows, number, ranks) in zip(cases, of_rank, strict=True):
            truth, held_out, _ = alone[KINDS.index(kind)]
            assert len(truth) == 8 and truth[-1][0] < truth[0][0]
            assert ranks == 2
            np.testing.assert_allclose(rows, truth, rtol=2e-5)
            assert number == pytest.approx(held_out, rel=2e-5)
