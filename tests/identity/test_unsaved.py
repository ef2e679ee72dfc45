"""What forward remembers and no checkpoint holds is told before the first save, for a resumed run begins without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.identity.walk import Walker
from paddle_dp.train import Callback, Moment
from tests.house.datasets import Samples
from tests.ranks import run_ranks

SAVES = [{"use": "checkpoint", "every": "1 step"}]


class Moving(nn.Layer):
    """Keeps a mean of what it has seen: as an attribute, as a buffer, or, changing nothing, as a table."""

    def __init__(self, how: str):
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 3)
        if how == "attribute":
            self.seen = paddle.zeros([4])
        else:
            self.register_buffer("seen", paddle.zeros([4]), persistable=how == "buffer")

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        if self.training and self.how != "table":
            self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        self.last = x.mean()  # made in forward: nobody takes it for a state
        return self.linear(x - self.seen)


def train(folder: Path, model: nn.Layer, optimizer: Any, steps: int = 3, **more: Any) -> None:
    """So many steps, with saves."""
    words = {
        "loss": "cross_entropy",
        "train": Samples(12, lambda i: (np.full(4, i, "float32"), i % 3)),
        "batch": 4,
        "callbacks": SAVES,
        "folder": folder / "run",
    }
    Trainer.of(**{**words, "model": model, "optimizer": optimizer, **more}).fit(f"{steps} steps")


def sgd(model: nn.Layer, rate: Any = 0.1) -> paddle.optimizer.Optimizer:
    return paddle.optimizer.SGD(rate, parameters=model.parameters())


@pytest.mark.parametrize(("how", "told"), [("attribute", 1), ("lost", 1), ("buffer", 0), ("table", 0)])
def test_a_buffer_that_training_changes_and_no_checkpoint_holds_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str, told: int
) -> None:
    model = Moving(how)
    train(tmp_path, model, sgd(model))
    said = capsys.readouterr().err
    assert said.count("buffer seen: changed in training, and not in the checkpoint") == told
    assert said.count("buffer") == 2 * told  # register_buffer, and no other one


class Remembers(paddle.optimizer.SGD):
    """Counts its updates, and holds a momentum, in Python; its parameters and its list of factors are nothing new."""

    def __init__(self, rate: float, parameters: Any):
        super().__init__(rate, parameters=parameters)
        self.parameters, self.factors, self.momentum = list(parameters), [0.5, 0.9], {}
        self.updates = 0

    def step(self) -> None:
        self.updates += 1
        self.momentum = {p.name: p.grad * self.factors[0] for p in self.parameters}
        super().step()


@pytest.mark.parametrize("own", [True, False])
def test_what_an_own_optimizer_remembers_in_python_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], own: bool
) -> None:
    model = nn.Linear(4, 3)
    kind = Remembers if own else paddle.optimizer.AdamW
    train(tmp_path, model, kind(0.1, parameters=model.parameters()))
    said = capsys.readouterr().err
    assert said.count("optimizer Remembers: its attributes momentum, updates changed in training") == own
    assert ("optimizer" in said) == own


def running_mean(folder: str) -> Any:
    """What this rank's model holds after a training that was never saved and never evaluated."""
    paddle.seed(0)
    model = nn.Sequential(nn.BatchNorm1D(4), nn.Linear(4, 3))
    train(Path(folder), model, sgd(model), callbacks=[])
    return model[0]._mean.numpy()


def test_ranks_have_the_same_running_statistics_after_a_training_that_was_never_saved(tmp_path: Path) -> None:
    first, second = run_ranks(running_mean, 2, str(tmp_path))
    assert first == second


class Counts(nn.Layer):
    """Counts its calls in a Python number, and from the third one on in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.late = nn.Linear(4, 3), 0, [0]

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        self.late[0] += self.calls > 2
        return self.linear(x)


class Slowly:
    """A loss whose object remembers how often it was called."""

    def __init__(self) -> None:
        self.state = Counter()

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        self.state.calls += 1
        return nn.functional.cross_entropy(outputs, targets, reduction="none")


class Counter:
    def __init__(self) -> None:
        self.calls = 0


class Phases(paddle.optimizer.lr.LRScheduler):
    """A schedule with a phase of its own."""

    def __init__(self) -> None:
        self.phase = 0.0
        super().__init__(0.1)

    def get_lr(self) -> float:
        self.phase += 0.1
        return float(self.base_lr)


class OnParameters(paddle.optimizer.SGD):
    """Hangs its momentum on the parameters, under a name that Paddle uses elsewhere, and an object of its own."""

    def __init__(self, rate: float, parameters: Any):
        super().__init__(rate, parameters=parameters)
        self.state = Counter()

    def step(self) -> None:
        self.state.calls += 1
        for parameter in self._parameter_list:
            parameter.velocity = np.array(parameter.grad)
        super().step()


def test_what_model_loss_and_schedule_remember_in_python_is_told_when_it_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Counts()
    train(tmp_path, model, sgd(model, Phases()), 4, loss=Slowly())
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said if "changed in training" in line] == [
        "model.calls and 2 more",
        "model.late",  # not yet at the first save
    ]


def test_an_optimizer_that_hangs_its_state_elsewhere_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(4, 3)
    train(tmp_path, model, OnParameters(0.1, model.parameters()), 2)
    said = capsys.readouterr().err
    assert "optimizer OnParameters: its attributes state, " in said
    assert f"{model.weight.name}.velocity" in said


class Doubles(Callback):
    """Changes a weight whenever a training begins."""

    def start(self, moment: Moment) -> None:
        weight = dict(moment.trainer.learner.placed.named_parameters())["bias"]
        weight.set_value(weight * 2 + 1)


class Rows:
    """An iterator that cannot be copied, such as a data loader's."""

    def __iter__(self) -> Rows:
        return self

    def __next__(self) -> int:
        return 0

    def __reduce__(self) -> Any:
        raise NotImplementedError("rows cannot be pickled")


class Patience(Callback):
    """Counts steps, and may end a training then; averages, lists and iterators of a callback are no settings."""

    def __init__(self, counts: bool = True) -> None:
        self.counts, self.steps, self.most = counts, 0, 5
        self.shadow, self.losses, self.rows = paddle.zeros([4]), [0.0], Rows()

    def step(self, moment: Moment) -> None:
        self.steps += self.counts
        self.shadow, self.losses = self.shadow + 1, [1.0]

    def state_dict(self) -> Any:
        raise ValueError("nobody saves it")


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ([True], "callback Patience.steps: "),
        ([False], ""),
        ([True, True], "callback Patience.steps and 1 more: "),
        ([False, True], "callback Patience ("),
    ],
)
def test_what_a_callback_counts_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], counts: list[bool], told: str
) -> None:
    model = nn.Linear(4, 3)
    train(tmp_path, model, sgd(model), callbacks=[*SAVES, *map(Patience, counts)])
    lines = [line for line in capsys.readouterr().err.splitlines() if "changed in training" in line]
    assert [line[: len(told)] for line in lines] == [told] * bool(told)


class Drop(Callback):
    """Sets the learning rate after the second update, or also at the start, as it is told to."""

    def __init__(self, at_start: bool = False) -> None:
        self.at_start = at_start

    def start(self, moment: Moment) -> None:
        if self.at_start:
            moment.trainer.learner.optimizer.set_lr(0.07)

    def step(self, moment: Moment) -> None:
        if moment.progress.step == 2:
            moment.trainer.learner.optimizer.set_lr(0.05)


@pytest.mark.parametrize(
    ("rate", "callbacks", "told"),
    [(0.1, [Drop()], 1), (0.1, [], 0), (0.05, [Drop()], 0), (0.1, [Drop(at_start=True)], 0)],
)
def test_a_rate_that_a_callback_sets_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: float, callbacks: list[Any], told: int
) -> None:
    model = nn.Linear(4, 3)
    train(tmp_path, model, sgd(model, rate), callbacks=[*SAVES, *callbacks])
    said = capsys.readouterr().err
    assert said.count("learning rate 0.05: a callback or the script has set it") == told
    assert said.count("a resumed run starts with 0.1") == told


class Freezes(Callback):
    """Freezes the bias after the second update, and sets a rate factor of the weight; or does both at the start."""

    def __init__(self, at_start: bool) -> None:
        self.at_start = at_start

    def start(self, moment: Moment) -> None:
        if self.at_start:
            self._set(moment)

    def step(self, moment: Moment) -> None:
        if moment.progress.step >= 2:
            self._set(moment)

    def _set(self, moment: Moment) -> None:
        named = dict(moment.trainer.learner.placed.named_parameters())
        named["bias"].stop_gradient = True
        named["weight"].optimize_attr = {"learning_rate": 0.1}


@pytest.mark.parametrize(("callbacks", "told"), [([Freezes(False)], 1), ([Freezes(True)], 0), ([], 0)])
def test_a_parameter_that_a_callback_freezes_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], callbacks: list[Any], told: int
) -> None:
    model = nn.Linear(4, 3)
    train(
        tmp_path,
        model,
        sgd(model),
        4,
        callbacks=[*SAVES, *callbacks],
        test=Samples(4, lambda i: (np.ones(4, "float32"), 0)),
    )
    said = capsys.readouterr().err
    assert (
        said.count(
            "parameter weight.optimize_attr and 1 more: a forward, a callback or the script has set it"
        )
        == told
    )
    assert said.count("parameter ") == told


def test_a_resumed_run_whose_callback_freezes_at_the_start_tells_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its `start` is how a callback goes on; the run before has told that it froze in its midst."""
    for steps, at_start, told in ((3, False, 1), (6, True, 0)):
        model = nn.Linear(4, 3)
        train(tmp_path, model, sgd(model), steps, callbacks=[*SAVES, Freezes(at_start)], resume=at_start)
        assert capsys.readouterr().err.count("a forward, a callback or the script has set it") == told


class Sets(Callback):
    """After the second update, or at the start: sets a layer's mode and rate, the loss, the optimizer and its clip."""

    def __init__(self, model: nn.Layer, optimizer: Any, loss: Any, moment: str) -> None:
        self.of, self.at = lambda: (model, optimizer, loss), moment

    def start(self, moment: Moment) -> None:
        if self.at == "start":
            self._set()

    def step(self, moment: Moment) -> None:
        if moment.progress.step >= 2 and self.at != "never":
            self._set()

    def _set(self) -> None:
        model, optimizer, loss = self.of()
        model[0].eval()
        model[1].p, loss.label_smoothing = 0.25, 0.125
        for table in optimizer._param_groups:
            if isinstance(table, dict):
                table["weight_decay"], table["grad_clip"].clip_norm = 0.5, 2.0
                return
        optimizer._weight_decay, optimizer._grad_clip.clip_norm = 0.5, 2.0


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("moment", ["step", "start", "never"])
def test_a_mode_and_numbers_that_a_callback_sets_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], moment: str, grouped: bool
) -> None:
    model = nn.Sequential(nn.BatchNorm1D(4), nn.Dropout(0.5), nn.Linear(4, 3))
    loss = nn.CrossEntropyLoss(reduction="none")
    parameters: Any = model.parameters()
    if grouped:
        parameters = [{"params": parameters[:3]}, {"params": parameters[3:], "weight_decay": 0.0}]
    clip = nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=parameters, weight_decay=0.1, grad_clip=clip)
    callbacks = [*SAVES, {"use": "evaluate", "every": "1 step"}, Sets(model, optimizer, loss, moment)]
    held_out = Samples(4, lambda i: (np.ones(4, "float32"), 0))
    train(tmp_path, model, optimizer, 4, callbacks=callbacks, loss=loss, test=held_out)
    said = capsys.readouterr().err
    names = ["layer 0.training and 1 more", "loss.label_smoothing", "optimizer._weight_decay and 1 more"]
    if grouped:  # one clip for both groups
        names[2] = "optimizer.groups.0.weight_decay and 2 more"
    lines = [f"{name}: a forward, a callback or the script has set it" for name in names if moment == "step"]
    assert [line.partition(", and it is")[0] for line in said.splitlines() if "has set it" in line] == lines


class Pinned(nn.Layer):
    """Its forward sets the mode of its BatchNorm, in a resumed run as well."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1D(4), nn.Linear(4, 3)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.norm.eval()
        return self.linear(self.norm(x))


def test_a_mode_that_a_forward_sets_is_not_blamed_on_callbacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, model := Pinned(), sgd(model))
    printed = capsys.readouterr().err
    assert printed.count("layer norm.training: a forward, a callback or the script has set it") == 1
    assert "Nothing is lost if each forward sets it before it is used" in printed


def test_an_iterator_that_cannot_be_copied_is_no_state() -> None:
    assert Walker(state=True).walk({"rows": Rows()}) == {"rows": f"{__name__}.Rows"}


def test_a_callback_that_changes_weights_at_a_resume_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, resume in ((2, False), (4, True)):
        model = nn.Linear(4, 3)
        train(tmp_path, model, sgd(model), steps, callbacks=[*SAVES, Doubles()], resume=resume)
        said = capsys.readouterr().err
        assert ("bias: a callback changed it in `start`, after 2 updates" in said) == resume


def test_what_a_loss_remembers_in_its_closure_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def loss(outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        nonlocal calls
        calls += 1
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    model = nn.Linear(4, 3)
    train(tmp_path, model, sgd(model), 2, loss=loss)
    assert "loss.calls: changed in training, and not in the checkpoint" in capsys.readouterr().err
