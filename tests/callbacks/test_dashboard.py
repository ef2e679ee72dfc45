"""The dashboard's log, read back with VisualDL's own reader."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from paddle_dp.callbacks.dashboard import Config
from paddle_dp.callbacks.dashboard.visualdl import flat_settings
from paddle_dp.data import Loader
from paddle_dp.data.prepared import prepared
from paddle_dp.mesh.degrees import Degrees
from paddle_dp.plan.layout import Layout
from paddle_dp.recipe.schema import LoaderSettings
from paddle_dp.train import Callback, Moment, Run
from tests.callbacks.moments import At, Found


def dp_rank(run: Run) -> Any:
    from visualdl import LogReader

    (path,) = (run.folder / "visualdl").glob("*vdlrecords*")
    return LogReader(file_path=str(path))


def steps(run: Run, tag: str) -> list[int]:
    return [point.id for point in dp_rank(run).get_data("scalar", tag)]


def started(run: Run, moment: Moment, **config: Any) -> Callback:
    dashboard = Config(**config).build(run)
    dashboard.start(moment)
    return dashboard


NUMBERS = {
    "loss": 1.5, "lr": 0.1, "acc1": 0.25, "samples_per_second": 9.0, "seconds_per_step": 1.0,
    "memory": 2.0**21,
}  # fmt: skip


def test_a_step_is_a_point_on_every_curve(run: Run, at: At) -> None:
    dashboard = started(run, at("start", 0))
    dashboard.step(at("step", 10, **NUMBERS))
    dashboard.step(at("step", 20, **NUMBERS))
    found = dp_rank(run)
    tags = {"train/loss", "train/lr", "train/acc1", "speed/samples_per_second", "speed/memory_megabytes"}
    assert set(found.get_tags()["scalar"]) == tags
    assert [(p.id, p.value) for p in found.get_data("scalar", "train/loss")] == [(10, 1.5), (20, 1.5)]
    assert [p.value for p in found.get_data("scalar", "speed/memory_megabytes")] == [2.0, 2.0]


def test_the_first_tab_is_what_was_evaluated(run: Run, at: At, found: Found) -> None:
    """VisualDL opens on the first name of all: the seconds of checkpoints."""
    dashboard = started(run, at("start", 0))
    dashboard.step(at("step", 4, **NUMBERS))
    dashboard.saved(at("saved", 4, seconds=1.0), run.folder)
    dashboard.evaluated(at("evaluated", 4), found(loss=1.0))
    assert min(dp_rank(run).get_tags()["scalar"]) == "evaluation/loss"


def test_a_resumed_run_goes_on_without_doubled_steps(run: Run, at: At, found: Found) -> None:
    first = started(run, at("start", 0))
    for step in range(1, 8):
        first.step(at("step", step, loss=float(step)))
        first.evaluated(at("evaluated", step), found(loss=float(step)))
    second = started(run, at("start", 4))
    second.evaluated(at("evaluated", 4), found(loss=4.0))
    for step in range(5, 10):
        second.step(at("step", step, loss=10.0 * step))
    third = started(run, at("start", 9))
    third.step(at("step", 10, loss=0.0))
    assert steps(run, "train/loss") == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert steps(run, "evaluation/loss") == [1, 2, 3, 4]
    values = [point.value for point in dp_rank(run).get_data("scalar", "train/loss")]
    assert values == [1, 2, 3, 4, 50, 60, 70, 80, 90, 0]


def test_a_server_that_was_looking_goes_on_reading(run: Run, at: At) -> None:
    from visualdl.reader.record_reader import RecordReader

    started(run, at("start", 0)).step(at("step", 1, loss=1.0))
    (path,) = (run.folder / "visualdl").iterdir()
    server = RecordReader(str(path))
    assert len(server.get_remain()) == 3  # the log's name, the mesh, the loss
    started(run, at("start", 0)).step(at("step", 1, loss=2.0))
    (fresh,) = server.get_remain()
    assert b"train/loss" in fresh


def test_the_recipe_is_text_and_a_row_of_settings_with_results(run: Run, at: At, found: Found) -> None:
    tree = {"model": {"use": "mlp", "hidden": [8, 8]}, "train": {"batch": 2}}
    recipe = SimpleNamespace(model_dump=lambda mode: tree)
    run.folder.mkdir()
    (run.folder / "recipe.yaml").write_text("# a comment\nmodel:\n  use: mlp\n")
    dashboard = started(dataclasses.replace(run, recipe=recipe), at("start", 0))
    dashboard.evaluated(at("evaluated", 4), found(loss=1.0))
    dashboard.evaluated(at("evaluated", 8), found(loss=0.5))
    dashboard.end(at("end", 8))
    (text,) = dp_rank(run).get_data("text", "recipe")
    assert text.text.encoded_text_string == "■ model:\n  use: mlp"
    (row,) = dp_rank(run).get_data("hyper_parameters", "hparam")
    assert {h.name for h in row.hparam.hparamInfos} == {"model", "model/hidden", "train/batch"}
    assert [m.name for m in row.hparam.metricInfos] == ["evaluation/loss"]


def test_visualdl_lists_the_run_with_its_last_results(run: Run, at: At, found: Found) -> None:
    from visualdl import LogReader
    from visualdl.server import lib

    recipe = SimpleNamespace(model_dump=lambda mode: {"train": {"batch": 2, "drop_last": False}})
    dashboard = started(dataclasses.replace(run, recipe=recipe), at("start", 0))
    for step, loss in ((4, 1.0), (8, 0.25)):
        dashboard.evaluated(at("evaluated", step), found(loss=loss))
    (row,) = lib.get_hparam_list(LogReader(logdir=str(run.folder)))
    assert row["hparams"] == {"train/batch": 2, "train/drop_last": "no"}
    assert row["metrics"] == {"evaluation/loss": 0.25}


def test_settings_are_flat_and_of_the_types_that_visualdl_takes() -> None:
    model = {"use": "mlp", "hidden": [8, 8], "bias": True}
    flat = flat_settings({"name": "x", "model": model, "loss": None, "train": {"lr": 0.1}})
    of_model = {"model": "mlp", "model/hidden": "[8, 8]", "model/bias": "yes"}
    assert flat == {**of_model, "loss": "none", "train/lr": 0.1}
    assert not any("." in name for name in flat)  # a column of that name stays empty


def test_samples_are_shown_and_reading_them_draws_nothing(run: Run, at: At) -> None:
    from PIL import Image

    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    started(run, at("start", 0), images=5)
    assert np.random.rand() == expected
    samples = [*(f"samples/{number} dark" for number in range(4)), "samples/4 light"]
    assert sorted(dp_rank(run).get_tags()["image"]) == ["mesh", *samples]
    (shown,) = dp_rank(run).get_data("image", "samples/0 dark")
    assert Image.open(io.BytesIO(shown.image.encoded_image_string)).size == (64, 64)


class Labelled:
    """Pictures with targets that are no number of a class, but for the last."""

    classes = ("dark", "light")
    targets = (-100, 2, 0.5, {"mask": np.zeros(3)}, np.array([1]))

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[np.ndarray, Any]:
        return np.zeros((4, 4), "float32"), self.targets[index]


def test_a_target_that_is_no_number_of_a_class_has_no_name(run: Run, at: At) -> None:
    """-1 had the last class's name, and a class too many ended the training."""
    started(
        dataclasses.replace(run, train_loader=Loader.plain(Labelled(), batch=2)), at("start", 0), images=9
    )
    samples = [*(f"samples/{number}" for number in range(4)), "samples/4 light"]
    assert sorted(dp_rank(run).get_tags()["image"]) == ["mesh", *samples]


def test_samples_with_a_collate_fn_are_shown_as_it_makes_them(run: Run, at: At) -> None:
    def collate(samples: list[Any]) -> Any:
        return np.stack([picture for picture, _ in samples]), np.array([1 - label for _, label in samples])

    dataset = prepared(run.train_loader.dataset, LoaderSettings(), collate)
    started(dataclasses.replace(run, train_loader=Loader.plain(dataset, batch=2)), at("start", 0), images=1)
    assert sorted(dp_rank(run).get_tags()["image"]) == ["mesh", "samples/0 light"]


def test_the_confusion_matrix_is_a_picture(run: Run, at: At, found: Found) -> None:
    dashboard = started(run, at("start", 0), confusion=True)
    dashboard.evaluated(at("evaluated", 2), found(loss=2.0))
    dashboard.evaluated(at("evaluated", 4), found(loss=1.0))
    dashboard.end(at("end", 5))
    (shown,) = dp_rank(run).get_data("image", "evaluation/confusion")
    assert shown.id == 4 and shown.image.encoded_image_string.startswith(b"\x89PNG")


def test_histograms_count_the_finite_weights(run: Run, at: At, trainer: SimpleNamespace) -> None:
    """A frozen mask of -inf ended the training."""
    mask = paddle.to_tensor([[0.0, float("-inf")], [0.0, float("nan")]])
    named = [("mask", mask), ("closed", paddle.full([3], float("-inf"))), ("fc.weight", paddle.ones([4]))]
    placed = SimpleNamespace(named_parameters=lambda: named)
    trainer.learner = SimpleNamespace(placed=placed, weights=SimpleNamespace(collective_forward=False))
    started(run, at("start", 0), histograms=True).epoch(at("epoch", 4))
    assert dp_rank(run).get_tags()["histogram"] == ["weights/mask", "weights/fc.weight"]
    (drawn,) = dp_rank(run).get_data("histogram", "weights/mask")
    assert sum(drawn.histogram.hist) == 2


def test_histograms_count_every_weight(run: Run, at: At, trainer: SimpleNamespace) -> None:
    weights = paddle.arange(120, dtype="float32").astype("bfloat16")
    placed = SimpleNamespace(named_parameters=lambda: [("fc.weight", weights)])
    trainer.learner = SimpleNamespace(placed=placed, weights=SimpleNamespace(collective_forward=False))
    dashboard = started(run, at("start", 0), histograms=True)
    dashboard.epoch(at("epoch", 4))
    (drawn,) = dp_rank(run).get_data("histogram", "weights/fc.weight")
    assert sum(drawn.histogram.hist) == 120


@pytest.mark.parametrize(
    ("degrees", "stage3", "reason"),
    [
        ({"tensor": 2}, False, r"the weights are split over ranks \(tensor 2\)"),
        ({"data": 2, "pipeline": 3}, False, r"the weights are split over ranks \(pipeline 3\)"),
        ({"sharding": 2}, True, r"each rank has a part of the weights \(sharding in stage 3\)"),
        ({"sharding": 2, "sequence": 2}, False, ""),
    ],
)
def test_histograms_of_a_part_of_the_weights_are_not_drawn_as_the_whole_ones(
    run: Run, at: At, trainer: SimpleNamespace, capsys: pytest.CaptureFixture[str], degrees: dict[str, int],
    stage3: bool, reason: str,
) -> None:  # fmt: skip
    """Rank 0's slices had the whole weights' names."""
    placed = SimpleNamespace(named_parameters=lambda: [("fc.weight", paddle.ones([4]))])
    trainer.learner = SimpleNamespace(placed=placed, weights=SimpleNamespace(collective_forward=stage3))
    run = dataclasses.replace(run, layout=Layout(degrees=Degrees(**degrees)))
    dashboard = started(run, at("start", 0), histograms=True)
    dashboard.epoch(at("epoch", 4))
    assert re.fullmatch(
        f"histograms: none are drawn: {reason}\\.\n" if reason else "", capsys.readouterr().err
    )
    assert ("histogram" in dp_rank(run).get_tags()) == (not reason)


@pytest.mark.parametrize(
    ("name", "number", "tag"),
    [("top_5%", 0.5, "top_5_"), ("loss", float("nan"), "loss"), ("loss", float("inf"), "loss")],
)
def test_odd_names_and_numbers_can_be_read_back(run: Run, at: At, name: str, number: float, tag: str) -> None:
    started(run, at("start", 0)).step(at("step", 1, **{name: number}))
    assert steps(run, f"train/{tag}") == [1]


def test_the_log_stands_where_the_dashboard_command_looks(run: Run, at: At, tmp_path: Path) -> None:
    from visualdl import LogReader

    started(run, at("start", 0)).step(at("step", 1, loss=1.0))
    assert LogReader(logdir=str(tmp_path)).runs() == [str(run.folder / "visualdl")]
