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
from paddle_dp.data.sample import class_names
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
        ("model.classes=5", r"model\.classes is 5, and dataset digits has 10 classes: set model\.classes=10"),
    ],
)  # fmt: skip
def test_what_train_would_refuse_is_refused(override: str, said: str) -> None:
    with pytest.raises((UsageError, DataError), match=said):
        tried(read_recipe(DIGITS, [override]))


def test_a_sample_with_a_class_too_many_is_named(tmp_path: Path) -> None:
    """The advice to enlarge the model hid a wrong label."""
    for name in ("a.png", "b.png", "c.png", "d.png"):
        Image.new("RGB", (20, 20)).save(tmp_path / name)
    (tmp_path / "train_list.txt").write_text("a.png 0\nb.png 9\nc.png 1\n")
    (tmp_path / "val_list.txt").write_text("d.png 0\n")
    data = f"dataset={{use: image_list, path: {tmp_path}, size: 16}}"
    model = "model={use: convnet, classes: 2, widths: [4], channels: 3}"
    said = (
        r"model.classes is 2, and dataset image_list has 10 classes, and 1 of 3 samples have one that the model lacks: "
        r"sample 1 \(.*b.png\) has class 9: set model.classes=10, or correct the labels"
    )
    with pytest.raises(UsageError, match=said):
        tried(read_recipe(DIGITS, [data, model]))


class SortedByClass:
    """Eight samples of each of `held` classes; `labels`: a dtype of them, in an order that is not sorted."""

    def __init__(self, split: str, held: int = 4, classes: object = (), labels: str = ""):
        self.classes, self.numbers = classes, np.arange(8 * held) // 8
        if labels:
            self.numbers = np.roll(self.numbers, -4)
            self.labels = self.numbers.astype(labels)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return np.ones(4, "float32"), int(self.numbers[index])


class NotOfOne(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        assert len(x) > 1
        return super().forward(x)


def tried_by_class(
    settings: str, outputs: int, loss: str = "cross_entropy", model: str = "paddle.nn.Linear"
) -> list[str]:
    data = f"dataset={{use: {__name__}.SortedByClass{settings}}}"
    layer = f"model={{use: {model}, in_features: 4, out_features: {outputs}}}"
    return tried(read_recipe(DIGITS, [data, layer, f"loss={{use: {loss}}}", "callbacks=[]"]))


@pytest.mark.parametrize(
    ("settings", "sample"),
    [("", "31"), (", classes: 4", "31"), (", labels: int64", r"2\d"), (", labels: uint8", r"2\d")],
)
@pytest.mark.parametrize("model", ["paddle.nn.Linear", f"{__name__}.NotOfOne"])
def test_a_class_that_the_first_samples_do_not_have_is_refused(
    settings: str, sample: str, model: str
) -> None:
    """A model whose setting is not called `classes` passed, and a training stopped in its first epoch."""
    said = rf"sample {sample} of the training data: target 3 is no class: the 2 classes of the model's outputs are 0 to"
    with pytest.raises(UsageError, match=said):
        tried_by_class(settings, 2, model=model)
    assert tried_by_class(settings, 4, model=model) == []


class FeaturesInEvaluations(nn.Linear):
    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return super().forward(x) if self.training else x[:, :2]


def test_the_training_s_outputs_decide_and_not_an_evaluation_s() -> None:
    assert tried_by_class("", 4, model=f"{__name__}.FeaturesInEvaluations") == []


@pytest.mark.parametrize("classes", [np.int64(4), np.arange(32), len, None])
def test_classes_that_are_no_names_are_none(classes: object) -> None:
    assert class_names(SortedByClass("train", classes=classes)) == ()


def test_an_ignored_class_does_not_hide_the_highest() -> None:
    with pytest.raises(
        UsageError, match=r"sample 1\d of the training data: target 2 is no class: the 2 classes"
    ):
        tried_by_class(", labels: int64", 2, "cross_entropy, ignore_index: 3")
    assert tried_by_class(", labels: int64", 3, "cross_entropy, ignore_index: 3") == []


@pytest.mark.parametrize("settings", [", classes: [a, b, c, d, e, f, g, h, i, j]", ", labels: object"])
def test_names_of_classes_that_no_target_has_and_labels_of_objects_are_accepted(settings: str) -> None:
    assert tried_by_class(f", held: 2{settings}", 2) == []


def test_a_loss_of_embeddings_has_no_classes() -> None:
    """The outputs' width is no number of classes there."""
    assert tried_by_class("", 2, "triplet") == []


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


def test_a_dict_that_the_model_returns_is_not_taken_for_its_input() -> None:
    error = AttributeError(
        "'dict' object has no attribute 'shape' (your model returns a dict of 'logits', and …)"
    )
    sentence = explained(error, read_recipe(DIGITS))
    assert "your model returns a dict of 'logits'" in sentence and "takes one array" not in sentence


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


def _differentiating(outputs, targets):
    slope = paddle.autograd.jacobian(outputs.square().sum(-1), outputs, batch_axis=0)[:]
    return slope.flatten(1).square().sum(-1)


def test_a_derivative_that_an_evaluation_lacks_is_an_error_where_one_follows_and_else_a_note() -> None:
    """“Sizes of the model have to fit”, it was said, also of a training without evaluations."""
    recipe = read_recipe(DIGITS, ["metrics=[]"])
    quiet = recipe.model_copy(update={"callbacks": recipe.callbacks[:1]})
    with patch("paddle_dp.assembly.build.loss_of_recipe", lambda *given: _loss(_differentiating)):
        with pytest.raises(UsageError, match=r"in _differentiating: `slope = .*\n?.*enable_grad"):
            tried(recipe)
        (note,) = tried(quiet)
    assert note.startswith("an evaluation would end with this: ") and "enable_grad" in note


def _loss(function):
    return loss_of(
        type("Part", (), {"build": lambda self: function, "name": "bad", "shelf": "losses"})(), None, "mlp"
    )


def test_a_path_in_an_error_stays_as_it_was_written() -> None:
    error = ValueError("no such file: ../labels.txt.")
    assert "no such file: ../labels.txt. Samples of dataset digits: 3." in explained(
        error, read_recipe(DIGITS), "3"
    )
