"""The timeline: a window of batches, what is written of it, and that it is refused for one rank."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.callbacks.timeline import Config, draw
from paddle_dp.errors import UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.pipeline_schedule import idle, orders, timeline
from paddle_dp.recipe import read_recipe
from paddle_dp.train import Run
from tests.callbacks.moments import At, Capture
from tests.house.recipes import small_recipe

RECIPE = small_recipe(
    "length: 8 steps, batch: 4, micro_batches: 4", optimizer="sgd", schedule="constant, learning_rate: 0.1",
    model="gpt, vocab: 16, width: 8, heads: 2, depth: 6, length: 8",
    dataset="random_tokens, vocab: 16, length: 8, samples: 8, test_samples: 4",
    strategy="hybrid, pipeline: 2, pipeline_schedule: interleaved",
    callbacks="[{use: timeline, start: 2, steps: 3}]",
)  # fmt: skip


class Recorder:
    """Two stages, the second of which is slower at every step; disturbed at step 3."""

    def __init__(self) -> None:
        self.armed, self.step = False, 0

    def recordings(self) -> list[Any]:
        spans = timeline(orders("interleaved", 2, 4, 2), lambda stage, work: 0.01 + stage * self.step / 1000)
        return [SimpleNamespace(spans=spans, calm=0.4 if self.step == 3 else 0.99)]


@pytest.fixture
def staged(run: Run, tmp_path: Path) -> Run:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    run.folder.mkdir()
    mesh = Mesh(ranks=2, degrees=Degrees(pipeline=2))
    recipe = read_recipe(path)
    layout = recipe.strategy.config.layout(mesh.ranks)
    return dataclasses.replace(run, mesh=mesh, recipe=recipe, layout=layout)


def train(run: Run, at: At, trainer: SimpleNamespace, steps: int) -> list[int]:
    """Trains, and returns the steps that were recorded."""
    callback, recorder = Config(start=2, steps=3).build(run), Recorder()
    trainer.learner, recorded = SimpleNamespace(runner=SimpleNamespace(recorder=recorder)), []
    callback.start(at("start", 0))
    for recorder.step in range(1, steps + 1):
        recorded += [recorder.step] if recorder.armed else []
        callback.step(at("step", recorder.step))
    callback.end(at("end", steps))
    return recorded


def test_a_window_is_recorded_and_told(
    staged: Run, at: At, trainer: SimpleNamespace, capsys: Capture
) -> None:
    assert train(staged, at, trainer, 8) == [3, 4, 5]
    said = json.loads((staged.folder / "timeline.json").read_text())
    assert (said["schedule"], said["stages"], said["virtual_stages"], said["micro_batches"]) == (
        "interleaved",
        2,
        2,
        4,
    )
    assert said["predicted"] == pytest.approx(1 / 9)
    assert [batch["step"] for batch in said["batches"]] == [3, 4, 5]
    assert said["idle"] == said["batches"][1]["idle"]  # the medians
    assert said["idle"][0] > said["idle"][1]
    assert len(said["batches"][0]["spans"]) == 2 * 2 * 2 * 4
    assert "equal stages would be 11.1%" in capsys.readouterr().out


def test_a_training_that_ends_before_it_says_so(
    staged: Run, at: At, trainer: SimpleNamespace, capsys: Capture
) -> None:
    assert not train(staged, at, trainer, 2)
    assert "nothing was recorded" in capsys.readouterr().out
    assert not (staged.folder / "timeline.json").exists()


def test_the_picture_has_a_lane_for_each_stage() -> None:
    from matplotlib.image import imread

    heights = []
    for stages in (2, 4):
        spans = timeline(orders("1f1b", stages, 8))
        assert min(idle(spans, stages)) > 0
        heights.append(imread(io.BytesIO(draw(spans, "run", "1f1b"))).shape[0])
    assert heights[1] > 1.4 * heights[0]


def test_for_one_rank_it_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    path = tmp_path / "flat.yaml"
    path.write_text(
        RECIPE.replace("{use: hybrid, pipeline: 2, pipeline_schedule: interleaved}", "{use: single}")
    )
    recipe = read_recipe(path)
    with pytest.raises(
        UsageError, match="shows the ranks' exchange and a pipeline's stages, and there is one rank"
    ):
        recipe.callbacks[0].config.refuse(recipe, 1)
