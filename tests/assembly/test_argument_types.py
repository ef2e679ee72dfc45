"""Trainer.of refuses objects that train or exchange by themselves, and arguments of wrong types."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet import meta_parallel
from paddle.hapi.callbacks import EarlyStopping

from paddle_dp import Trainer, gloo, join
from paddle_dp.errors import UsageError
from tests.ranks import run_ranks

DATA = [([float(n)] * 4, n % 2) for n in range(8)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a training that is refused late has left its folder."""
    monkeypatch.chdir(tmp_path)


def described(folder: Path | str = "unused", **more: Any) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    settings = {"model": model, "loss": "cross_entropy", "optimizer": "adamw", "train": DATA, "batch": 4}
    return {**settings, "folder": folder, "callbacks": (), **more}


def refusal(**arguments: Any) -> str:
    with pytest.raises(UsageError) as error:
        Trainer.of(**described(**arguments))
    return str(error.value)


def average() -> Any:
    return paddle.incubate.ModelAverage(0.15, parameters=nn.Linear(2, 2).parameters())


@pytest.mark.parametrize(
    ("argument", "made", "said"),
    [
        ("model", lambda: paddle.Model(nn.Linear(4, 2)), r"Give its network, model\.network;"),
        ("optimizer", average, r"updates none\. .* ema=\{'decay': 0\.999\}"),
        (
            "train",
            lambda: paddle.io.DistributedBatchSampler(DATA, 2),
            "a DistributedBatchSampler gives indices",
        ),
        (
            "test",
            lambda: paddle.io.BatchSampler(DATA, batch_size=2),
            r"of\.test: a BatchSampler gives indices",
        ),
        ("test", lambda: paddle.io.RandomSampler(DATA), "a RandomSampler gives indices, not samples"),
        ("train", lambda: paddle.io.DataLoader(DATA), "a DataLoader makes batches"),
        ("strategy", fleet.DistributedStrategy, r"is fleet's\. Give settings such as \{'use': 'hybrid'"),
        (
            "callbacks",
            lambda: [EarlyStopping("loss")],
            "EarlyStopping is a callback of paddle.Model.*'early_stop'",
        ),
    ],
)
def test_an_object_of_paddle_s_own_trainings_is_answered_by_what_to_give(
    argument: str, made: Callable[[], Any], said: str
) -> None:
    assert re.search(said, refusal(**{argument: made()}))


def test_a_sampler_of_the_user_s_own_class_is_one_of_paddle_s() -> None:
    kind = type("Own", (paddle.io.BatchSampler,), {})
    assert "a Own gives indices" in refusal(train=kind(DATA, batch_size=2))


def of_fleet(folder: str) -> dict[str, str | None]:
    """The sentence on each object of fleet's, made after join()."""
    join()
    gloo.install("cpu")
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"mp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    plain = nn.Linear(4, 2)
    sgd = paddle.optimizer.SGD(0.1, parameters=plain.parameters())
    stages = [meta_parallel.LayerDesc(nn.Linear, 4, 2)]
    pipeline = type("Own", (meta_parallel.PipelineLayer,), {})
    cases: dict[str, dict[str, Any]] = {
        "optimizer": {"optimizer": fleet.distributed_optimizer(sgd)},
        "model": {"model": fleet.distributed_model(plain)},
        "within": {"model": nn.Sequential(paddle.DataParallel(nn.Linear(4, 2)))},
        "slices": {"model": nn.Sequential(meta_parallel.ColumnParallelLinear(4, 2, has_bias=True))},
        "stages": {
            "model": pipeline(stages, num_stages=1, topology=fleet.get_hybrid_communicate_group()._topo)
        },
    }
    sentences: dict[str, str | None] = {}
    for name, more in cases.items():
        try:
            Trainer.of(**described(folder, **more))
            sentences[name] = None
        except UsageError as error:
            sentences[name] = str(error)
    return sentences


def test_objects_of_fleet_are_refused_on_every_rank(tmp_path: Path) -> None:
    """A model with a DataParallel or with slices within trained on, without a word."""
    for sentences in run_ranks(of_fleet, 2, str(tmp_path / "run")):
        assert "a HybridParallelOptimizer exchanges gradients itself" in str(sentences["optimizer"])
        assert "it is wrapped in TensorParallel" in str(sentences["model"])
        assert "Trainer.of.model.0: it is wrapped in DataParallel" in str(sentences["within"])
        assert "Trainer.of.model.0: it is a ColumnParallelLinear, of which" in str(sentences["slices"])
        assert "it is a PipelineLayer, of which" in str(sentences["stages"])


SETTINGS = ("ema", "mix", "evaluation", "loader", "guard")


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [
        *((name, value, "takes settings such as {") for name in SETTINGS for value in ("0.99", 3, True, [])),
        ("loader", paddle.io.DataLoader(DATA), "not an object of paddle.io.reader.DataLoader."),
        ("load", 3, "takes a path, or settings such as {'path'"),
        ("schedule", 0.1, "{'use': 'constant', 'learning_rate': 0.1}, not 0.1."),
        ("schedule", paddle.optimizer.lr.StepDecay, "not the class StepDecay: give an object, StepDecay(…)."),
        ("optimizer", 3, "takes an optimizer of paddle.optimizer, its class, a function"),
        ("model", nn.Linear, "takes a paddle.nn.Layer, not the class Linear: give an object, Linear(…)."),
        ("model", "resnet50", "takes a paddle.nn.Layer, not 'resnet50'."),
        ("model", None, "Trainer.of needs model=…: a paddle.nn.Layer."),
        ("loss", nn.CrossEntropyLoss, "give an object, CrossEntropyLoss(…)."),
        ("loss", [nn.CrossEntropyLoss()], "takes a function of (outputs, targets)"),
        ("collate_fn", "batch", "takes a function of a list of samples, not 'batch'."),
        ("adapter", True, "takes settings such as {'use': 'lora'"),
        ("strategy", 3, "takes a word, or settings such as {'use': 'hybrid', 'tensor': 2}, not 3."),
        ("train", None, "Trainer.of needs train=…: a data set, with len(d)"),
        ("train", "digits", "'digits' is no data set."),
        ("test", {"use": "digits"}, "{'use': 'digits'} is no data set."),
    ],
)
def test_a_wrong_type_is_answered_by_the_types_that_the_argument_takes(
    argument: str, value: Any, said: str, tmp_path: Path
) -> None:
    text = refusal(folder=tmp_path / "run", **{argument: value})
    assert said in text
    assert text.startswith((f"Trainer.of.{argument}", f"Trainer.of needs {argument}"))


def test_an_argument_that_lacks_is_named() -> None:
    with pytest.raises(UsageError, match=r"Trainer\.of needs optimizer=…: an optimizer of paddle\.optimizer"):
        Trainer.of(model=nn.Linear(4, 2), loss="cross_entropy", train=DATA, batch=4)
