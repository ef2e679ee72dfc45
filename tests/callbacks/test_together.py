"""All callbacks in a real training on two ranks, broken off in mid-epoch and resumed: files as if nothing happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.house.recipes import small_recipe
from tests.house.runs import events
from tests.ranks import run_ranks

RECIPE = small_recipe(
    "length: 60 steps, batch: 64", model="mlp, inputs: 64, hidden: [16], classes: 10", optimizer="momentum",
    schedule="constant, learning_rate: 0.1", strategy="hybrid",
    callbacks="[{use: console}, {use: metrics, every: 4 steps}, "
    "{use: dashboard, every: 6 steps, histograms: true, peak_flops: 1.0e+9}, "
    "{use: evaluate, per_class: true}, {use: checkpoint, every: 10 steps, keep: 2, best: loss}, "
    "{use: early_stop, patience: 50}, {use: profile, start: 3, steps: 2}]",
)  # fmt: skip


def broken_and_resumed(folder: str) -> list[Any]:
    """In every rank: 36 updates, an accident, and the rest from the newest checkpoint."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe

    mesh = join(seed=0)
    recipe = read_recipe(str(Path(folder, "recipe.yaml")), [f"output_dir={folder}/run"])
    trainer = build(recipe, mesh)
    learn = trainer.learner.train_batch

    def accident(batch: Any, *how: Any) -> dict[str, float] | None:
        if trainer.progress.step == 36:
            raise RuntimeError("an accident")
        return learn(batch, *how)

    trainer.learner.train_batch = accident  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="an accident"):
        trainer.fit(recipe.train.length)
    second = build(recipe, mesh, "newest")
    begun = second.progress.step
    return [begun, second.fit(recipe.train.length).step]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    (folder / "recipe.yaml").write_text(RECIPE)
    assert run_ranks(broken_and_resumed, 2, str(folder)) == [[30, 60]] * 2
    return folder / "run"


def test_metrics_hold_every_step_once(folder: Path) -> None:
    lines = events(folder)
    by_event = {
        kind: [line["step"] for line in events(folder, kind)] for kind in {line["event"] for line in lines}
    }
    assert by_event["step"] == list(range(4, 61, 4))
    assert by_event["evaluated"] == [23, 46, 60] and by_event["epoch"] == [23, 46]
    assert by_event["start"] == [0, 30] and by_event["end"] == [60] and "failed" not in by_event
    assert {line["held_out"] for line in lines if line["event"] == "evaluated"} == {360}


def test_the_dashboard_holds_every_step_once_and_knows_of_all_ranks(folder: Path) -> None:
    from visualdl import LogReader

    (path,) = (folder / "visualdl").iterdir()
    found = LogReader(file_path=str(path))
    assert [point.id for point in found.get_data("scalar", "train/loss")] == list(range(6, 61, 6))
    assert [point.id for point in found.get_data("scalar", "evaluation/loss")] == [23, 46, 60]
    assert [drawn.id for drawn in found.get_data("histogram", "weights/body.0.weight")] == [23, 46]
    assert len(found.get_data("hyper_parameters", "hparam")) == 1
    assert [point.id for point in found.get_data("image", "mesh")] == [0, 30]
    for tag in ("memory_megabytes/rank 0", "memory_megabytes/rank 1"):
        assert [point.id for point in found.get_data("scalar", tag)] == list(range(6, 61, 6))
    sizes = [point.value for point in found.get_data("scalar", "memory_megabytes/rank 1")]
    assert all(50 < size < 5000 for size in sizes)
    assert all(point.value > 0 for point in found.get_data("scalar", "speed/model_flops_utilisation"))


def test_checkpoints_are_the_newest_and_the_best(folder: Path) -> None:
    from paddle_dp import checkpoint

    steps = [checkpoint.step_of(path) for path in checkpoint.checkpoints(folder / "checkpoints")]
    losses = {line["step"]: line["loss"] for line in events(folder, "evaluated")}
    best = min(losses, key=lambda step: losses[step])
    assert steps == sorted({50, 60, best})
    assert checkpoint.best_numbers(folder / "checkpoints")["loss"] == losses[best]


def test_the_last_evaluation_is_the_last_step(folder: Path) -> None:
    content = json.loads((folder / "evaluation.json").read_text())
    assert content["step"] == 60 and content["samples"] == 360 and len(content["per_class"]) == 10


def test_the_profile_is_the_first_ranks(folder: Path) -> None:
    assert sorted(path.name for path in (folder / "profile").iterdir()) == ["rank-0.json", "rank-0.txt"]
