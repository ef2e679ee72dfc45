"""The loop: what is told when, where it stops, and what it does with bad numbers."""

import random
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp import checkpoint
from paddle_dp.assembly.assemble import TrainerBuilder
from paddle_dp.assembly.trainer import Trainer, schedule_line
from paddle_dp.data import Loader
from paddle_dp.errors import DataError, LossError, UsageError
from paddle_dp.learner import full_model_learner
from paddle_dp.losses.cross_entropy import Config as CrossEntropy
from paddle_dp.mesh import Mesh
from paddle_dp.part import read_part
from paddle_dp.train import Callback, Progress, Run
from paddle_dp.train.evaluate import evaluate
from paddle_dp.units import Every, Recompute
from tests.house.datasets import Samples
from tests.house.learners import task_of
from tests.house.runs import events


class Points(Samples):
    def __init__(self, samples=10):
        super().__init__(samples, lambda i: (np.full([3], i / 10, "float32"), np.int64(i % 2)))


class Diary(Callback):
    """Writes down every moment."""

    def __init__(self, every=None):
        self.every = Every.parse(every) if every else None
        self.lines = []

    def _note(self, moment, what=None):
        self.lines.append((moment.name, moment.progress.epoch, moment.progress.batch, moment.progress.step))

    start = epoch = evaluated = saved = end = _note

    def step(self, moment):
        self._note(moment)
        self.numbers = dict(moment.numbers)

    def failed(self, moment, error):
        self._note(moment)
        self.error = error


def trainer(*callbacks, samples=10, rate=0.1, loss=None):
    paddle.seed(0)
    task = task_of(nn.Linear(3, 2), loss, "SGD", rate)
    mesh = Mesh.alone()
    return Trainer(full_model_learner(task, mesh), Loader.plain(Points(samples), 4, mesh), callbacks)


def test_moments_in_order():
    """10 samples in batches of 4 are 3 steps an epoch; 2 epochs are 6."""
    diary = Diary("2 steps")
    assert trainer(diary).fit("2 epochs") == Progress(epoch=2, batch=0, step=6, samples=20)
    assert diary.lines == [
        ("start", 0, 0, 0), ("step", 0, 2, 2), ("epoch", 1, 0, 3), ("step", 1, 1, 4), ("step", 1, 3, 6),
        ("epoch", 2, 0, 6), ("end", 2, 0, 6),
    ]  # fmt: skip
    assert set(diary.numbers) >= {
        "loss", "acc1", "lr", "gradient_norm", "samples_per_second", "waiting", "memory",
    }  # fmt: skip
    assert diary.numbers["lr"] == pytest.approx(0.1)


def test_steps_end_in_mid_epoch_and_go_on_from_there():
    diary = Diary("1 epoch")
    running = trainer(diary)
    assert running.fit("4 steps") == Progress(epoch=1, batch=1, step=4, samples=14)
    assert running.fit("6 steps") == Progress(epoch=2, batch=0, step=6, samples=20)
    assert [line for line in diary.lines if line[0] == "epoch"] == [("epoch", 1, 0, 3), ("epoch", 2, 0, 6)]


def test_going_on_is_the_same_as_never_stopping():
    whole, halves = trainer(), trainer()
    whole.fit("5 steps")
    halves.fit("2 steps")
    halves.fit("5 steps")
    np.testing.assert_array_equal(whole.learner.model.weight.numpy(), halves.learner.model.weight.numpy())


def test_a_callback_may_stop_it(monkeypatch):
    waits = []
    monkeypatch.setattr(Mesh, "wait", lambda mesh, name: waits.append(name))

    class Enough(Callback):
        def step(self, moment):
            if moment.progress.step == 2:
                moment.trainer.stop("enough")

    diary = Diary()
    training = trainer(Enough(), diary)
    assert training.fit("9 epochs").step == 2
    assert diary.lines[-1] == ("end", 0, 2, 2)
    # A rank that alone has called it stands still with that name; after the last update the others end as well.
    assert waits == ["trainer.stop on every rank"]
    assert trainer(Enough()).fit("2 steps").step == 2
    assert len(waits) == 1
    assert training.fit("4 steps").step == 4  # an earlier stop ended every later training


def test_a_loss_that_is_no_number_ends_it_with_a_sentence():
    diary = Diary()
    with pytest.raises(LossError, match="the loss is nan at step 2"):
        trainer(diary, rate=float("inf")).fit("1 epoch")
    assert diary.lines[-1][0] == "failed"
    assert isinstance(diary.error, LossError)


def test_a_second_failure_does_not_hide_the_first():
    class Broken(Diary):
        def step(self, moment):
            raise ZeroDivisionError("first")

        def failed(self, moment, error):
            raise KeyError("second")

    diary = Diary()
    with pytest.raises(ZeroDivisionError, match="first"):
        trainer(Broken(), diary).fit("1 epoch")
    assert diary.lines[-1][0] == "failed"


def test_nothing_held_out_is_said():
    with pytest.raises(UsageError, match="no held-out data"):
        trainer().evaluate()


class Sparse(Points):
    """Labels of which some batches have none that counts."""

    def __init__(self, counting):
        super().__init__()
        self.counting = counting

    def __getitem__(self, i):
        return super().__getitem__(i)[0], np.int64(i % 2 if i in self.counting else -1)


def sparse(counting, *callbacks):
    paddle.seed(0)
    task = task_of(nn.Linear(3, 2), CrossEntropy(ignore_index=-1).build(), "Adam")
    mesh = Mesh.alone()
    run = Run(
        name="sparse", folder=Path("runs/sparse"), mesh=mesh,
        train_loader=Loader.plain(Sparse(counting), 4, mesh, shuffle=False),
        test_loader=Loader.plain(Sparse(counting), 4, mesh, shuffle=False),
    )  # fmt: skip
    return Trainer(full_model_learner(task, mesh), run.train_loader, callbacks, run=run)


@pytest.mark.parametrize("read", [True, False])
def test_a_batch_in_which_nothing_counts_is_passed_over_and_said(read, capsys):
    """10 samples in batches of 4: in the second nothing counts, whether anybody reads its numbers or not."""
    weights = []

    class Watching(Callback):
        reads = read

        def step(self, moment):
            weights.append(moment.trainer.learner.model.weight.numpy().copy())

    assert sparse({0, 1, 2, 3, 8}, Watching()).fit("3 steps").step == 3
    np.testing.assert_array_equal(weights[0], weights[1])
    assert (weights[1] != weights[2]).any()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "step 2: not one target of this global batch of 4 samples counts, so no update was made" in said


def test_an_evaluation_in_which_nothing_counts_is_refused_and_one_that_counts_a_little_is_right():
    assert sparse({8}).evaluate().numbers["loss"] > 0
    with pytest.raises(DataError, match="not one target of the 10 held-out samples counts"):
        sparse(set()).evaluate()


class Odd(Points):
    """Sample 7 has a label of no class; all inputs are NumPy's own float64."""

    def __getitem__(self, i):
        return np.full([3], i / 10), np.int32(5 if i == 7 else i % 2)

    def name_of(self, i):
        return f"row-{i}.txt"


@pytest.mark.parametrize("loss", [CrossEntropy().build(), nn.CrossEntropyLoss(reduction="none")])
def test_a_label_of_no_class_is_told_with_its_sample(loss):
    said = r"sample 7 \(row-7.txt\) of the {} data: target 5 is no class: the 2 classes .* 0 to 1"
    running = trainer(loss=loss)
    running.loader = Loader.plain(Odd(), 4, Mesh.alone())
    with pytest.raises(LossError, match=said.format("training")):
        running.fit("1 epoch")
    held_out = Loader.plain(Odd(), 4, Mesh.alone(), shuffle=False)
    with pytest.raises(LossError, match=said.format("held-out")):
        evaluate(running.learner, held_out, Mesh.alone())


def test_float64_inputs_and_int32_labels_are_read_as_the_model_needs_them():
    class Plain(Odd):
        def __getitem__(self, i):
            return super().__getitem__(i)[0], np.int32(i % 2)

    given, wanted = trainer(), trainer()
    given.loader = Loader.plain(Plain(), 4, Mesh.alone())
    given.fit("1 epoch")
    wanted.fit("1 epoch")
    np.testing.assert_array_equal(given.learner.model.weight.numpy(), wanted.learner.model.weight.numpy())
    assert evaluate(given.learner, given.loader, Mesh.alone()).numbers["acc1"] > 0


def test_a_callback_that_is_added_hears_what_the_others_do():
    early, late = Diary(), Diary()
    running = trainer(early)
    running.fit("2 steps")
    running.add(late)
    running.fit("4 steps")
    assert late.lines == early.lines[4:]
    assert [line[0] for line in late.lines] == ["start", "step", "epoch", "step", "end"]
    assert late.numbers == early.numbers
    with pytest.raises(UsageError, match=r"is not a paddle_dp\.Callback"):
        running.add(object())


def test_the_last_step_is_told_to_those_that_read_whatever_their_every_says():
    told = []

    class Seldom(Callback):
        every = Every.parse("2 steps")

        def __init__(self, reads):
            self.reads = reads

        def step(self, moment):
            told.append((moment.progress.step, self.reads, "loss" in moment.numbers))

    trainer(Seldom(True), Seldom(False)).fit("5 steps")
    assert told == [(2, True, True), (2, False, True), (4, True, True), (4, False, True), (5, True, True)]


def test_of_a_step_those_that_read_hear_first_and_of_the_rest_last():
    told = []

    class Named(Callback):
        def __init__(self, name, reads):
            self.name, self.reads = name, reads

        def step(self, moment):
            told.append(self.name)

        def epoch(self, moment):
            told.append(self.name)

    running = trainer(Named("writes", True))
    running.add(Named("saves", False))
    running.fit("1 epoch")
    assert told == ["writes", "saves"] * 3 + ["saves", "writes"]


def scripted(folder: Path, optimizer: object) -> Trainer:
    return Trainer.of(
        model=nn.Linear(3, 2), loss="cross_entropy", optimizer=optimizer, train=Points(), batch=4,
        callbacks=[], folder=folder / "run",
    )  # fmt: skip


@pytest.mark.parametrize("optimizer", ["adamw", paddle.optimizer.SGD])
def test_an_optimizer_s_word_or_class_has_a_recipe_s_schedule(tmp_path: Path, optimizer) -> None:
    made = scripted(tmp_path, optimizer)
    assert made.fit("2 steps").step == 2
    assert made.learner.optimizer.get_lr() == 1e-3


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ([], "a list of 0"),
        ([], "one for each loss in turns="),
        (nn.Linear, "Linear is a class that is not derived from"),
    ],
)
def test_what_is_no_optimizer_is_refused_by_name(tmp_path: Path, optimizer, said) -> None:
    with pytest.raises(UsageError, match=said):
        scripted(tmp_path, optimizer)


def test_a_frozen_weight_that_a_block_writes_is_named_where_micro_batches_interleave():
    """In a pipeline backward would read the value of a later micro-batch; a buffer has a copy for each forward."""
    chain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))

    def named(pipeline: int, micro_batches: int, *names: str) -> dict[str, str]:
        config = SimpleNamespace(recompute=Recompute(), chained="strategy.pipeline" if pipeline > 1 else "")
        requested = SimpleNamespace(
            strategy=SimpleNamespace(config=config), train=SimpleNamespace(micro_batches=micro_batches)
        )
        builder = SimpleNamespace(setup=SimpleNamespace(requested=requested))
        return TrainerBuilder._written_in_blocks(builder, SimpleNamespace(model=chain), names)

    (sentence,) = named(2, 4, "model.1.mean", "model.1.bias").values()
    assert "model.1.bias is written in the forward of a block" in sentence and "register_buffer" in sentence
    assert not named(2, 1, "model.1.bias") and not named(1, 4, "model.1.bias")
    assert not named(2, 4, "model.1.mean")  # an attribute of Python: backward has its value of then


def test_a_line_says_what_a_users_scheduler_does_in_an_epoch() -> None:
    lr = paddle.optimizer.lr
    calls: list[int] = []

    def remembers(update: int) -> float:
        calls.append(update)
        return 1.0 / len(calls)

    for schedule, text in (
        (lr.ExponentialDecay(0.1, 0.9), "ExponentialDecay .*: 0.1 at first, 0.00798 after an epoch, 3.59e-07 at the"),
        (lr.MultiStepDecay(0.1, [2, 4]), r"If milestones=\[2, 4\] counts epochs, multiply by 24"),
        (lr.LambdaDecay(0.1, remembers), "LambdaDecay .*: 0.05 at first, 0.0333 after an epoch, 0.025 at the"),
        (lr.LambdaDecay(0.1, lambda update: random.random()), r"LambdaDecay steps after every .* an epoch\.$"),
        (lr.MultiplicativeDecay(0.1, lambda epoch: 0.95), "0.1 at first, 0.0292 after an epoch, 0.000223 at the end"),
        (lr.LinearLR(0.1, 9), r"LinearLR steps after every update, 24 times an epoch\. If total_steps=9 counts"),
    ):  # fmt: skip
        assert re.search(text, schedule_line(schedule, steps=120, steps_per_epoch=24))
    assert calls == [0]  # by Paddle, when it was made
    cosine = read_part("schedules", {"use": "cosine", "learning_rate": 0.1})
    for quiet in (None, 0.1, cosine.build(steps=120, steps_per_epoch=24, batch=8)):
        assert schedule_line(quiet, 120, 24) == ""


def test_the_last_updates_are_saved_before_the_last_evaluation(tmp_path):
    """A signal in it, or its error, lost the updates since the last checkpoint; the resumed run makes up for it."""

    class Broken(Callback):
        reads = False

        def evaluated(self, moment, evaluation):
            raise RuntimeError("in the evaluation")

    def fit(*more, resume=False):
        paddle.seed(0)
        return Trainer.of(
            model=nn.Linear(3, 2), loss="cross_entropy", train=Points(), test=Points(), batch=4, optimizer="sgd",
            callbacks=[*more, "metrics", "evaluate", {"use": "checkpoint", "every": None, "best": "loss"}],
            folder=tmp_path, resume=resume,
        ).fit("2 steps")  # fmt: skip

    with pytest.raises(RuntimeError, match="in the evaluation"):
        fit(Broken())
    folder = tmp_path / "checkpoints"
    assert checkpoint.newest(folder).name == "step-00000002" and checkpoint.best(folder) is None
    fit(resume=True)
    assert checkpoint.best(folder).name == "step-00000002"
    assert [row["step"] for row in events(tmp_path, "evaluated")] == [2]
