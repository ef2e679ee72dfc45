"""The evaluate callback: once a step, at the end whatever happens, and files that say what was found."""

from __future__ import annotations

import dataclasses
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_dp.callbacks._pictures import draw_confusion
from paddle_dp.callbacks.evaluate import Config
from paddle_dp.mesh import Mesh
from paddle_dp.train import Evaluation, Run
from paddle_dp.units import Every
from tests.callbacks.moments import At, Found


def test_the_end_is_evaluated_unless_it_is_already(
    run: Run, at: At, found: Found, trainer: SimpleNamespace
) -> None:
    callback = Config().build(run)
    callback.epoch(at("epoch", 4))
    callback.evaluated(at("evaluated", 4), found(loss=1.0))
    callback.end(at("end", 4))
    assert trainer.asked == ["evaluate"]
    callback.end(at("end", 6))
    assert trainer.asked == ["evaluate", "evaluate"]


def test_it_is_due_by_steps_or_by_epochs(run: Run) -> None:
    by_step = Config(every=Every.parse("3 steps")).build(run)
    assert by_step.due_at_step(3) and not by_step.due_at_step(4) and not by_step.due_at_epoch(1)
    by_epoch = Config().build(run)
    assert by_epoch.due_at_epoch(1) and not by_epoch.due_at_step(1)


def test_a_run_with_nothing_held_out_is_left_alone(run: Run, at: At, trainer: SimpleNamespace) -> None:
    callback = Config().build(dataclasses.replace(run, test_loader=None))
    callback.epoch(at("epoch", 4))
    callback.end(at("end", 4))
    assert trainer.asked == []


def test_the_file_holds_the_numbers_and_what_was_asked_for(run: Run, at: At, found: Found) -> None:
    Config(per_class=False, confusion=False).build(run).evaluated(
        at("evaluated", 4), found(loss=1.5, acc1=0.875)
    )
    content = json.loads((run.folder / "evaluation.json").read_text())
    assert content == {"epoch": 1, "step": 4, "samples": 8, "loss": 1.5, "acc1": 0.875}
    assert not (run.folder / "confusion.png").exists()
    callback = Config(per_class=True, confusion=True).build(run)
    callback.evaluated(at("evaluated", 8), found(loss=1.0))
    assert not (run.folder / "confusion.png").exists()  # drawn once, at the end
    callback.end(at("end", 8))
    text = (run.folder / "evaluation.json").read_text()
    assert text.endswith(
        '"confusion": [\n  [3, 1],\n  [0, 4]\n ]\n}\n'
    )  # a line for each row, not each number
    content = json.loads(text)
    assert content["step"] == 8 and content["confusion"] == [[3, 1], [0, 4]]
    dark, light = content["per_class"]
    assert dark == {
        "class": "dark", "precision": 1.0, "recall": 0.75, "f1": pytest.approx(6 / 7), "support": 4,
    }  # fmt: skip
    assert light["precision"] == 0.8 and light["recall"] == 1.0
    assert (run.folder / "confusion.png").read_bytes().startswith(b"\x89PNG")


def test_other_ranks_evaluate_and_write_nothing(
    run: Run, at: At, found: Found, trainer: SimpleNamespace
) -> None:
    callback = Config().build(dataclasses.replace(run, mesh=Mesh(rank=1, ranks=2)))
    callback.end(at("end", 4))
    callback.evaluated(at("evaluated", 4), found(loss=1.0))
    assert trainer.asked == ["evaluate"] and not run.folder.exists()


def test_a_model_may_have_more_classes_than_the_data_has_names() -> None:
    evaluation = Evaluation(numbers={}, samples=3, confusion=np.diag([1, 2, 0, 0]), classes=("dark", "light"))
    assert [row["class"] for row in evaluation.per_class()] == ["dark", "light", "2", "3"]
    png = draw_confusion(evaluation, "step 1")
    assert png.startswith(b"\x89PNG")
    assert draw_confusion(evaluation, "step 1") is png  # of two callbacks the second draws nothing: 0.3 s


@pytest.mark.parametrize("classes", [2, 30, 102])
def test_a_confusion_matrix_of_any_size_is_a_picture(classes: int) -> None:
    from PIL import Image

    confusion = np.eye(classes, dtype="int64") * 3
    confusion[0, 0] = 0  # a class without samples divides by nothing
    png = draw_confusion(Evaluation(numbers={}, samples=int(confusion.sum()), confusion=confusion), "step 1")
    width, height = Image.open(io.BytesIO(png)).size
    assert 200 < height <= width < 1800
