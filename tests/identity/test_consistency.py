"""Ranks that would not begin the same training are told so, with the first thing that differs."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.errors import UsageError
from paddle_dp.identity import consistency, facts
from paddle_dp.identity.task_facts import task_facts
from paddle_dp.identity.walk import checksum
from paddle_dp.learner import Task
from paddle_dp.mesh import join
from paddle_dp.recipe import read_recipe
from tests.house import datasets as house
from tests.ranks import run_ranks


def refusal(*tables: dict[str, Any]) -> str | None:
    """What the first of several ranks is told that bring these facts; the others bring theirs to every gathering."""
    gathered = itertools.count()

    def gather(mine: Any) -> list[Any]:
        digests = [checksum(json.dumps(table, default=str)) for table in tables]
        return digests if not next(gathered) else [[table, f"host-{n}", n] for n, table in enumerate(tables)]

    mesh: Any = SimpleNamespace(rank=0, ranks=len(tables), host="host-0", gather=gather)
    try:
        consistency.compare(tables[0], mesh, "Mend it.")
    except UsageError as error:
        return str(error)
    return None


def test_the_first_key_that_differs_is_named_with_its_values_and_who_has_them() -> None:
    here, there = {"a": 1, "train.batch": 64, "z": 0}, {"a": 1, "train.batch": 32, "z": 1}
    assert refusal(here, here) is None
    assert refusal(here, there, here) == (
        "the ranks do not begin the same training. train.batch: 64 on ranks 0, 2 (nodes 0, 2; host host-0, host-2); "
        "32 on rank 1 (node 1; host host-1). Mend it."
    )
    assert "b: nothing on rank 0" in str(refusal({}, {"b": 1}))


def test_paths_may_differ_and_what_lies_there_may_not() -> None:
    path, copy, other = (
        {"path": name, "crc32": crc} for name, crc in (("/a/x", "1"), ("/b/x", "1"), ("/b/x", "2"))
    )
    assert refusal({"p": path}, {"p": copy}) is None
    assert "p: /a/x on rank 0" in str(refusal({"p": path}, {"p": other}))
    assert "p: /a/x on rank 0" in str(refusal({"p": path}, {"p": "adamw"}))


def test_a_recipe_counts_but_for_its_folder_its_name_its_workers_and_where_its_data_are(
    tmp_path: Path,
) -> None:
    def of(*words: str) -> dict[str, Any]:
        return facts.recipe_facts(read_recipe("configs/digits_mlp.yaml", words))

    base = of()
    assert of("output_dir=elsewhere", "name=other", "loader.num_workers=3") == base
    for word in ("train.seed=7", "optimizer.clip=0.5", "model.hidden=[3]", "callbacks.checkpoint.keep=9"):
        changed = of(word)
        differing = [key for key in base if base[key] != changed[key]]
        assert len(differing) == 1 and differing[0].split(".")[-1] == word.split("=")[0].split(".")[-1]
    (tmp_path / "data").mkdir()
    assert facts.flat("dataset", {"path": str(tmp_path / "data"), "use": "cifar"}) == {
        "dataset.path": {"path": str(tmp_path / "data"), "crc32": None},
        "dataset.use": "cifar",
    }
    (tmp_path / "table").write_text("1")
    assert facts.flat("model", {"words": str(tmp_path / "table")})["model.words"]["crc32"].startswith(
        "CRC-32 "
    )


class Points(house.Points):
    def __init__(self, samples: int = 24, draw: int = 0, each_time: bool = False):
        super().__init__(samples, seed=draw, by_index=True)
        self.each_time = each_time

    def __getitem__(self, i: int) -> Any:
        noise = np.frombuffer(os.urandom(6), np.uint8) / 1000 if self.each_time else 0
        return (self.inputs[i] + noise).astype("float32"), i % 4


class Replaced(Points):
    """One sample is another, none of the four that are shown first."""

    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(4 if i == 3 else i)


def told_of(**how: Any) -> Any:
    """The facts of a task in which one thing is otherwise."""
    paddle.seed(3)
    model = nn.Sequential(nn.Linear(6, 4), how.get("act", nn.Tanh()))
    weight = paddle.to_tensor(how.get("weight", [1.0, 1.0, 1.0, 1.0]))
    loss = nn.CrossEntropyLoss(weight=weight, reduction="none")
    model[0].bias.need_clip = how.get("clipped", True)
    schedule = paddle.optimizer.lr.PiecewiseDecay(how.get("boundaries", [2, 5]), [0.1, 0.1, 0.1])
    optimizer = paddle.optimizer.SGD(schedule, parameters=model.parameters())
    return task_facts(Task(model=model, loss=loss, optimizer=optimizer))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"act": nn.ReLU()}, "model.1: paddle.nn.layer.activation.Tanh on rank 0 (node 0"),
        ({"weight": [1.0, 1.0, 1.0, 3.0]}, "loss.weight: float32[4], CRC-32 "),
        ({"clipped": False}, "optimizer.not_clipped: nothing on rank 0"),
        ({"boundaries": [3, 5]}, "schedule of the optimizer.boundaries: [2, 5] on rank 0"),
    ],
)
def test_what_was_made_in_python_is_told_by_its_key(how: dict[str, Any], said: str) -> None:
    assert refusal(told_of(), told_of()) is None
    assert said in str(refusal(told_of(), told_of(**how)))


def made(folder: str, **how: Any) -> Trainer:
    paddle.seed(3)
    words: dict[str, Any] = {
        "model": nn.Linear(6, 4), "loss": "cross_entropy", "optimizer": "adamw", "train": Points(), "batch": 8,
        "schedule": {"use": "constant", "learning_rate": 3e-3}, "length": "4 steps", "folder": folder,
        "callbacks": ["metrics"],
    }  # fmt: skip
    return Trainer.of(**{**words, **how})


# What rank 1 does otherwise, and what both must be told; "" where it may be so.
DIFFERENT: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"batch": 4}, "batch: 8 on rank 0 (host"),
    (lambda: {"seed": 4}, "seed: 0 on rank 0 (host"),
    (lambda: {"length": "5 steps"}, "length: 4 steps on rank 0"),
    (lambda: {"train": Points(23)}, "samples in the training data: 24 on rank 0"),
    (lambda: {"train": Points(draw=1)}, "sample 0 of the training data: inputs float32[1, 6] "),
    (lambda: {"train": Replaced()}, "samples 17, 10, 3, 20 of the training data: "),
    (
        lambda: {"train": Points(draw=1), "loader": {"num_workers": 1}},
        "sample 0 of the training data: inputs float32[1, 6]",
    ),
    (lambda: {"resume": True}, "resume: null on rank 0"),
    (lambda: {"train": Points(each_time=True)}, ""),
    (lambda: {"test": Points()}, "samples in the held-out data: null on rank 0"),
    (lambda: {"model": nn.Linear(6, 5)}, "parameter weight: float32[6, 4] on rank 0"),
    (
        lambda: {"strategy": {"use": "data_parallel", "find_unused_parameters": True}},
        "strategy.find_unused_parameters: false on rank 0",
    ),
    (
        lambda: {"loss": {"use": "cross_entropy", "label_smoothing": 0.3}},
        "loss.label_smoothing: 0.0 on rank 0",
    ),
    (
        lambda: {"callbacks": []},
        'callbacks: ["every 10 steps, reads", "always, reads", "always, reads"] on rank 0',
    ),
    (lambda: {"precision": "bfloat16"}, "precision: Precision(dtype='float32'"),
    (lambda: {"folder": f"/nowhere/{os.getpid()}"}, ""),
]


def begin(folder: str) -> list[Any]:
    """What this rank was told in each case, how many updates it made, and the run's folder."""
    mesh, told = join(), []
    for number, (other, _) in enumerate(DIFFERENT):
        how = other() if mesh.rank else {}
        try:
            trainer = made(**{"folder": f"{folder}/{number}", **how})
            steps = trainer.fit().step
            told.append(["", steps, str(trainer.run.folder)])
        except UsageError as error:
            told.append([str(error), 0, ""])
        mesh.wait("told")
    return told


def test_two_ranks_with_something_different_do_not_begin(tmp_path: Path) -> None:
    first, second = run_ranks(begin, 2, str(tmp_path), timeout=200)
    assert first == second
    for number, ((_, wanted), (said, steps, folder)) in enumerate(zip(DIFFERENT, first, strict=True)):
        assert wanted in said, (number, said)
        assert (steps, folder) == (0, "") if wanted else (4, str(tmp_path / str(number)))
