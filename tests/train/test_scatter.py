"""A training whose data rank 0 alone reads: the bits of each rank reading; streams, resumes, and no folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.house.recipes import small_recipe
from tests.house.training import build_trainer, finished
from tests.parity import assert_same_weights, recorded
from tests.ranks import run_ranks

SAMPLES = 40


class Folder:
    """Samples in files of a folder of the working directory, with noise drawn for each; `streamed`: in order."""

    def __init__(self, split: str):
        self.files = sorted(Path("samples", split).iterdir())
        self.classes = ("a", "b", "c")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        row = np.load(self.files[index])
        return (row + np.random.rand(12)).astype("float32"), np.int64(index % 3)


class Stream:
    """The same without a length."""

    def __init__(self, split: str):
        self.folder = Folder(split)

    def __iter__(self) -> Any:
        return (self.folder[index] for index in range(len(self.folder)))


def folder_at(path: Path) -> None:
    random = np.random.default_rng(1)
    for split, count in (("train", SAMPLES), ("test", 10)):
        (path / "samples" / split).mkdir(parents=True)
        for number in range(count):
            np.save(path / "samples" / split / f"{number:03d}.npy", random.standard_normal(12))


def learned(
    home: str,
    out: str,
    reading: str,
    dataset: str = "Folder",
    workers: int = 0,
    strategy: str = "{use: data_parallel}",
    until: str = "9 steps",
    resume: bool = False,
    hidden: bool = False,
) -> dict[str, Any]:
    """In every rank: losses, an evaluation and the checkpoint. `hidden`: ranks but the first do not see the data."""
    from paddle_dp.mesh import join

    if join(seed=3).is_main or not hidden:
        os.chdir(home)
    samples = f", samples: {SAMPLES}" if dataset == "Stream" else ""
    text = small_recipe(
        "length: 9 steps, batch: 11, micro_batches: 2, seed: 3", schedule="constant, learning_rate: 0.01",
        model="mlp, inputs: 12, hidden: [16], classes: 3, dropout: 0.1", strategy=strategy, callbacks="[]",
        dataset=f"tests.train.test_scatter.{dataset}, reading: {reading}",
        loader=f"{{num_workers: {workers}{samples}}}",
    )  # fmt: skip
    trainer = build_trainer(text, out, resume=resume)
    return finished(trainer, out, until) | {"workers": trainer.loader.num_workers}


def same_bits(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["rows"] == other["rows"] and one["held_out"] == other["held_out"]
    assert_same_weights(one["saved"], other["saved"])


@pytest.mark.long
@pytest.mark.timeout(120)
def test_only_rank_0_needs_the_data_and_every_bit_is_that_of_each_rank_reading(tmp_path: Path) -> None:
    folder_at(tmp_path)
    found = []
    for reading in ("each", "scatter"):
        (out := tmp_path / reading).mkdir()
        found.append(run_ranks(learned, 2, str(tmp_path), str(out), reading, hidden=reading == "scatter"))
    same_bits(found[0][0], found[1][0])
    assert found[1][1]["rows"] == found[1][0]["rows"] and found[1][0]["differences"] == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "dataset", "workers", "strategy"),
    [
        (3, "Folder", 2, "{use: data_parallel}"),
        (3, "Stream", 0, "{use: data_parallel}"),
        (2, "Stream", 1, "{use: data_parallel}"),
        (2, "Folder", 0, "{use: hybrid, pipeline: 2}"),
        (4, "Folder", 1, "{use: hybrid, pipeline: 2, data: 2}"),
        (2, "Folder", 0, "{use: hybrid, sharding: 2, sharding_stage: 3}"),
    ],
)
def test_scattered_the_bits_are_the_same(tmp_path, ranks, dataset, workers, strategy) -> None:
    folder_at(tmp_path)
    found = []
    for reading in ("each", "scatter"):
        (out := tmp_path / reading).mkdir()
        settings = {
            "dataset": dataset,
            "workers": workers,
            "strategy": strategy,
            "hidden": reading == "scatter",
        }
        found.append(run_ranks(learned, ranks, str(tmp_path), str(out), reading, timeout=200, **settings))
    same_bits(found[0][0], found[1][0])
    assert [each["workers"] for each in found[1]] == [workers, *[0] * (ranks - 1)]


@pytest.mark.long
@pytest.mark.parametrize("dataset", ["Folder", "Stream"])
def test_a_resume_in_the_midst_of_an_epoch_on_other_ranks_reads_on(tmp_path, dataset) -> None:
    """And from scattered to each rank reading."""
    folder_at(tmp_path)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    (whole,) = run_ranks(learned, 1, str(tmp_path), str(tmp_path / "whole"), "each", dataset)
    parts = str(tmp_path), str(tmp_path / "parts")
    rows = []
    for ranks, reading, until in (
        (3, "scatter", "2 steps"),
        (2, "scatter", "5 steps"),
        (3, "each", "9 steps"),
    ):
        settings = {"dataset": dataset, "until": until, "resume": until != "2 steps"}
        found = run_ranks(learned, ranks, *parts, reading, hidden=reading == "scatter", **settings)
        rows += found[0]["rows"]
    np.testing.assert_allclose(rows, whole["rows"], rtol=1e-5)


def read_once(out: str) -> dict[str, Any]:
    """In every rank: a generator that rank 0 alone has, through Trainer.of."""
    import paddle

    from paddle_dp.assembly.trainer import Trainer
    from paddle_dp.mesh import join

    mesh = join(seed=3)
    paddle.seed(3)
    random = np.random.default_rng(1)
    data = ((random.standard_normal(12).astype("float32"), np.int64(i % 3)) for i in range(SAMPLES))
    model = paddle.nn.Linear(12, 3)
    trainer = Trainer.of(
        model=model, train=data if mesh.is_main else ..., batch=11, loss="cross_entropy", optimizer="sgd",
        length="1 epoch", reading="scatter", loader={"samples": SAMPLES}, callbacks=[], folder=out,
    )  # fmt: skip
    rows = recorded(trainer)
    trainer.fit()
    return {"rows": rows}


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_generator_that_only_rank_0_has_is_read_once(tmp_path: Path) -> None:
    one, many = (run_ranks(read_once, ranks, str(tmp_path / str(ranks))) for ranks in (1, 2))
    np.testing.assert_allclose(many[1]["rows"], one[0]["rows"], rtol=1e-5)
    assert len(one[0]["rows"]) == 4
