"""`check` finds what `train` would refuse: a trial on one process, in sentences."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import paddle
import pytest
from paddle import nn
from PIL import Image

from paddle_dp.assembly import first_forward
from paddle_dp.assembly.first_forward import answer, explained, tried, user_frame
from paddle_dp.core.loss import loss_of
from paddle_dp.errors import DataError, InstallError, UsageError
from paddle_dp.launch.check_process import CheckProcess
from paddle_dp.launch.command import Job
from paddle_dp.launch.failures import TRACEBACK, Failure, describe
from paddle_dp.recipe import read_recipe
from paddle_dp.train import Callback, Run
from paddle_dp.verbs.forecast import layout_of
from tests.jobs import run_in_one_fork

DIGITS = "configs/digits_mlp.yaml"
TEXTS = """
model: {{use: gpt, vocab: {vocab}, width: 16, depth: 1, heads: 2, length: 16}}
dataset: {{use: text_files, path: {path}, cache: {cache}, length: 16}}
loss: {{use: cross_entropy}}
optimizer: {{use: adamw}}
train: {{length: 2 steps, batch: 4}}
"""
LOSS = """
def bad(outputs, targets):
    return outputs.nothing
"""


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.inputs=100", r"(?s)model mlp and the loss .* digits: .*64.*100.*float32\[64\].*model.inputs"),
        ("callbacks.checkpoint.best=f1", r"checkpoint\.best: .*\[{use: classification}\].* They have acc1, acc5, loss"),
        ("callbacks=[{use: checkpoint, best: acc1}]", r"checkpoint\.best: nothing evaluates acc1: add evaluate to the"),
        ("callbacks.5={use: early_stop, watch: val_loss}", r"early_stop\.watch: .* 'val_loss'\. Did you mean 'loss'\?"),
        ("dataset={use: image_folder}", r"dataset\.path is not given"),
        ("dataset={use: text_files, tokenizer: gpt2}", r"dataset\.tokenizer: gpt2 does not exist"),
        ("schedule={use: plateau, learning_rate: 0.1, watch: val_loss}",
         r"schedule\.watch: .* 'val_loss'\. Did you mean 'loss'\?"),
        ("train={length: 1 epoch, batch: 2000, drop_last: true}", r"leaves nothing of 1437 samples in batches of 2000"),
        ("model.classes=5", r"sample .* of the training data, which has 10 classes: target 8 is no class: the 5"),
    ],
)  # fmt: skip
def test_what_train_would_refuse_is_refused(override: str, said: str) -> None:
    with pytest.raises((UsageError, DataError), match=said):
        tried(read_recipe(DIGITS, [override]))


def test_a_sample_with_a_class_too_many_is_named(tmp_path: Path) -> None:
    """The advice to enlarge the model hid a wrong label."""
    for name in ("a.png", "b.png", "c.png"):
        Image.new("RGB", (20, 20)).save(tmp_path / name)
    (tmp_path / "train_list.txt").write_text("a.png 0\nb.png 9\nc.png 1\n")
    (tmp_path / "val_list.txt").write_text("a.png 0\n")
    data = f"dataset={{use: image_list, path: {tmp_path}, size: 16}}"
    model = "model={use: convnet, classes: 2, widths: [4], channels: 3}"
    said = r"sample 1 \(.*b.png\) of the training data, which has 10 classes: target 9 is no class: the 2 classes of"
    with pytest.raises(UsageError, match=said):
        tried(read_recipe(DIGITS, [data, model]))


class SortedByClass:
    """Eight samples of each of four classes, and no names of classes."""

    def __init__(self, split: str, names: tuple[str, ...] = ()):
        self.classes = names

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.ones(4, "float32"), 0 if self.classes else index // 8


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            "",
            r"sample 31 of the training data: target 3 is no class: the 2 classes of the model's outputs are 0 to 1",
        ),
        (
            ", names: [a, b, c, d]",
            r"^the training data, which has 4 classes: target 3 is no class: the 2 classes",
        ),
    ],
)
def test_a_class_that_the_first_samples_do_not_have_is_refused(names: str, said: str) -> None:
    """A model whose setting is not called `classes` passed, and a training stopped in its first epoch."""
    words = [f"dataset={{use: {__name__}.SortedByClass{names}}}", "callbacks=[]"]
    model = "model={{use: paddle.nn.Linear, in_features: 4, out_features: {}}}"
    with pytest.raises(UsageError, match=said):
        tried(read_recipe(DIGITS, [*words, model.format(2)]))
    assert tried(read_recipe(DIGITS, [*words, model.format(4)])) == []


def test_a_loss_of_embeddings_has_no_classes() -> None:
    """The outputs' width is no number of classes there."""
    data = f"dataset={{use: {__name__}.SortedByClass, names: [a, b, c, d]}}"
    model = "model={use: paddle.nn.Linear, in_features: 4, out_features: 2}"
    assert tried(read_recipe(DIGITS, [data, model, "loss={use: triplet}", "callbacks=[]"])) == []


def test_a_vocabulary_that_is_too_small_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc " * 200)
    file = tmp_path / "lm.yaml"
    file.write_text(TEXTS.format(vocab=100, path=tmp_path / "text.txt", cache=tmp_path / "cache"))
    with pytest.raises(
        UsageError, match=r"model\.vocab is 100, and the tokens .* are 256: set model\.vocab=256"
    ):
        tried(read_recipe(file))
    error = ValueError("OP(embedding) expected >= 0 and < 300, but got 415")
    assert explained(error, read_recipe(file)).startswith(
        "model gpt has an embedding of 300 rows, and dataset text_files has the number 415"
    )


def test_a_right_recipe_passes_and_what_is_not_tried_is_said() -> None:
    assert tried(read_recipe(DIGITS)) == []
    assert "tried on the CPU" in tried(read_recipe(DIGITS, ["train.device=gpu"]))[0]
    (line,) = tried(read_recipe(DIGITS, ["model.hidden=[8000, 8000]"]))
    assert line.startswith("not run, only read: the model has 64,")


class ForJobs(Callback):
    """Works only in a job, and is named without a Config."""

    needs_job = True

    def __init__(self, run: Run):
        raise AssertionError("it was built")


def test_a_callback_that_needs_a_job_is_left_out() -> None:
    """A timeline was refused for one rank, and checkpoints in memory without the folder of `train --restarts`."""
    for name, word in (
        ("timeline", "timeline"),
        ("memory_checkpoint", "memory_checkpoint, every: 5 steps"),
        (f"{__name__}.ForJobs", f"{__name__}.ForJobs"),
    ):
        recipe = read_recipe(DIGITS, [f"callbacks=[{{use: console}}, {{use: {word}}}]"])
        assert tried(recipe) == [f"callback {name} works only in a job: not tried"]
    with pytest.raises(UsageError, match=r"callback timeline .* there is one rank"):
        layout_of(read_recipe(DIGITS, ["callbacks=[{use: timeline}]"]), 1)


@pytest.mark.parametrize(
    ("tracker", "package"), [("tensorboard", "tensorboardX"), ("trackio", "trackio"), ("swanlab", "swanlab")]
)
def test_a_tracker_without_its_package_is_refused(
    tracker: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InstallError, match=rf"callback {tracker} needs"):
        tried(read_recipe(DIGITS, [f"callbacks=[{{use: {tracker}}}]"]))


@pytest.mark.processes
def test_a_model_that_takes_too_long_is_not_said_to_refuse_the_samples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the time is over within the model's forward: a busy machine is no mistake of the recipe."""

    def forward(layer: nn.Linear, x: paddle.Tensor) -> None:
        (tmp_path / "entered").touch()
        time.sleep(30)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    monkeypatch.setattr(first_forward, "SECONDS", 3)
    assert answer(DIGITS, []) == {"lines": ["not tried to the end: it took more than 3 s"]}
    assert (tmp_path / "entered").exists()


def test_a_training_s_first_update_says_it_in_the_same_sentence(tmp_path: Path) -> None:
    """A traceback of Paddle's ended it."""
    words = ("model.inputs=100", "train.length=2 steps", f"output_dir={tmp_path / 'run'}")
    status, _, complained = run_in_one_fork(Job(recipe=Path(DIGITS).resolve(), overrides=words), tmp_path)
    assert status == 1 and complained.startswith(
        "model mlp and the loss do not take the first samples of dataset"
    )
    assert "Traceback" not in complained


@pytest.mark.processes
def test_a_misspelt_argument_of_a_foreign_class_is_named_by_the_process_that_tries() -> None:
    with CheckProcess() as ask:
        with pytest.raises(UsageError, match=r"'num_clases' is no argument .* Did you mean 'num_classes'\?"):
            ask(Path(DIGITS), ["model={use: paddle.vision.models.resnet18, num_clases: 3}"])
        assert ask(Path(DIGITS), []) == []


def test_a_users_own_error_shows_the_users_frames_alone(tmp_path: Path) -> None:
    """25 frames of ours stood above it."""
    (tmp_path / "own_loss.py").write_text(LOSS)
    space: dict = {"__name__": "own_loss"}
    exec(compile(LOSS, str(tmp_path / "own_loss.py"), "exec"), space)
    recipe = read_recipe(DIGITS)
    loss = patch("paddle_dp.assembly.build.loss_of_recipe", lambda *given: _loss(space["bad"]))
    with loss, pytest.raises(UsageError) as caught:
        tried(recipe)
    error = caught.value.__cause__
    assert error is not None and "own_loss.py, line 3, in bad" in user_frame(error)
    failure = Failure.from_error(error, 0)
    assert "own_loss.py" in failure.traceback and "paddle_dp/core" not in failure.traceback
    assert "paddle_dp/core" in failure.frames and TRACEBACK.format(0) in describe(failure, 1, None)
    failure.write(tmp_path)
    assert (tmp_path / TRACEBACK.format(0)).read_text() == failure.frames


def _loss(function):
    return loss_of(
        type("Part", (), {"build": lambda self: function, "name": "bad", "shelf": "losses"})(), None, "mlp"
    )


def test_a_path_in_an_error_stays_as_it_was_written() -> None:
    error = ValueError("no such file: ../labels.txt.")
    assert "no such file: ../labels.txt. Samples of dataset digits: 3." in explained(
        error, read_recipe(DIGITS), "3"
    )
