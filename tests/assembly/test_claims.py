"""What a training on ranks says of itself: facts, and never a claim of one process's result without a verdict.

The models here are not one process's on two ranks, or cannot be known to be, mostly in ways that no trial before the
first step finds: numbers drawn late, memory in buffers, attributes, lists and generators, callbacks that change one
rank.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.errors import DivergenceError
from paddle_dp.train import Callback, Moment
from tests.house.datasets import Samples
from tests.house.training import untried
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes
STEPS, CLASSES = 10, 4
POINTS = np.random.RandomState(0).randn(64, 6).astype("float32")


def point(i: int) -> tuple[np.ndarray, np.ndarray]:
    return POINTS[i], np.asarray(POINTS[i][:CLASSES].argmax())


class Liar(nn.Layer):
    """A small network whose hidden features `lie(self, features, step)` changes, in training."""

    def __init__(self, lie: Callable[[Any, paddle.Tensor, int], paddle.Tensor] | None = None):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, CLASSES)
        self.register_buffer("queue", paddle.zeros([4, 8]))
        self.lie, self.calls = lie, 0
        self.mean, self.kept, self.table = 0.0, deque(maxlen=4), {"mean": np.zeros(8, "float32")}
        self.rng, self.numbers, self.turns = (
            random.Random(0),
            np.random.default_rng(0),
            itertools.cycle([0, 1, 1]),
        )

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        self.calls += self.training
        h = F.relu(self.drop(self.first(x)))
        return self.last(self.lie(self, h, self.calls) if self.lie and self.training else h)


def late_noise(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    return h + 0.1 * paddle.randn(h.shape) if step > 3 else h


def growing_dropout(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    rate = 0.1 * (step - 1)
    return h * (paddle.rand(h.shape) >= rate).astype("float32") if rate else h


def late_numpy(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    return h * float(np.random.rand()) if step > 5 else h


def queue(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    near = h - 0.1 * self.queue.mean(0)
    with paddle.no_grad():
        self.queue.set_value(paddle.concat([self.queue[1:], h[:1].detach()]))
    return near


def mean_as_float(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    self.mean = 0.9 * self.mean + 0.1 * float(h.mean())
    return h - self.mean


def kept_in_a_list(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    self.kept.append(float(h.mean()))
    return h - sum(self.kept) / len(self.kept)


def kept_in_a_table(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    self.table["mean"] = 0.9 * self.table["mean"] + 0.1 * h.detach().numpy().mean(0)
    return h - paddle.to_tensor(self.table["mean"])


def layer_drop(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    return h if self.rng.random() < 0.5 else 0.5 * h


def drop_by_numpy(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    return h if self.numbers.random() < 0.5 else 0.5 * h


def by_turns(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    return h * (1 + next(self.turns))


def mixed_for_a_while(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    return h - 0.3 * h.mean(0) if 3 <= step <= 8 else h


def mixed_late(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    return h - 0.3 * h.mean(0) if step >= 7 else h


def balanced_late(self: Any, h: paddle.Tensor, step: int) -> paddle.Tensor:
    return h / (1 + (h.norm(axis=0, keepdim=True) if step > 4 else 0))


class LateLoss:
    """Remembers from its twelfth call on."""

    def __init__(self) -> None:
        self.calls, self.total = 0, 0.0

    def __call__(self, outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        self.calls += 1
        losses = F.cross_entropy(outputs, targets, reduction="none")
        self.total += 0.01 * float(losses.mean()) if self.calls > 7 else 0.0
        return losses * (1 + self.total)


class OnOneRank(Callback):
    """Changes a layer after step 4, on rank 1 alone."""

    def __init__(self, change: Callable[[Any], None]):
        self.change = change

    def step(self, moment: Moment) -> None:
        if moment.progress.step == 4 and moment.trainer.mesh.rank == 1:
            self.change(moment.trainer.learner)


def set_rate(learner: Any) -> None:
    learner.model.drop.p = 0.5


def add_hook(learner: Any) -> None:
    learner.model.first.register_forward_post_hook(lambda layer, inputs, outputs: outputs * 1.05)


def to_evaluation(learner: Any) -> None:
    learner.model.drop.training = False


def set_learning_rate(learner: Any) -> None:
    learner.optimizer.set_lr(learner.optimizer.get_lr() * 1.5)


def set_loss(learner: Any) -> None:
    learner.loss.function.ignore_index = 1


LIES = [
    late_noise, growing_dropout, late_numpy, queue, mean_as_float, kept_in_a_list, kept_in_a_table, layer_drop,
    drop_by_numpy, by_turns, mixed_for_a_while, mixed_late, balanced_late,
]  # fmt: skip
CHANGES = [set_rate, add_hook, to_evaluation, set_learning_rate, set_loss]


def fit(
    folder: str, model: nn.Layer, loss: Any = None, change: Any = None, **more: Any
) -> tuple[str, list[Any]]:
    """The screen of a training, and the weights after it."""
    screen = io.StringIO()
    callbacks = ["console", *([OnOneRank(change)] if change else [])]
    with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
        trainer = Trainer.of(
            model=model, loss=loss or nn.CrossEntropyLoss(reduction="none"), train=Samples(64, point), batch=8,
            optimizer={"use": "sgd"}, length=f"{STEPS} steps", callbacks=callbacks, folder=folder, **more,
        )  # fmt: skip
        try:
            trainer.fit()
        except DivergenceError as error:
            print(error)
    return screen.getvalue(), [parameter.tolist() for parameter in model.parameters()]


def liars(folder: str, lies: list[str]) -> dict[str, tuple[str, list[Any]]]:
    """In each rank: the screens of these, and their weights."""
    found = {}
    for lie in (lie for lie in LIES if lie.__name__ in lies):
        paddle.seed(1)
        found[lie.__name__] = fit(f"{folder}/{lie.__name__}", Liar(lie))
    return found


def others(folder: str) -> dict[str, str]:
    """In each rank: the screens of a loss and of layers that are not one process's, and of an honest model."""
    chain = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, CLASSES))
    again = {"use": "data_parallel", "recompute": "full"}
    return {
        "late loss": fit(f"{folder}/loss", Liar(), LateLoss())[0],
        "spectral norm": fit(f"{folder}/spectral", chain, strategy=again)[0],
        "honest": fit(f"{folder}/honest", Liar())[0],
    }


def changed(folder: str) -> dict[str, str]:
    """In each rank: the screens where a callback changes one rank, and where forward changes each."""
    found, every = {}, {"use": "data_parallel", "check_every": "3 steps"}
    paddle.seed(1)
    found["in Python"] = fit(f"{folder}/python", Liar(mean_as_float), strategy=every)[0]
    untried()
    for change in CHANGES:
        paddle.seed(1)
        found[change.__name__] = fit(f"{folder}/{change.__name__}", Liar(), change=change, strategy=every)[0]
    return found


def all_of_it(folder: str, lies: list[str], late: list[str], moving: list[str]) -> list[Any]:
    """In each rank: (screen, weights) of false models, screens of others, and of what is changed on the way; the
    weights of those `moving` that were not tried before, nor were the `late` ones, in which a trial finds nothing."""
    told = [liars(folder, lies), others(folder), changed(folder)]  # the last one tries no other
    told[0] |= liars(folder, late)
    return [*told, {name: weights for name, (_, weights) in liars(f"{folder}/untried", moving).items()}]


# Of each kind: numbers drawn late, memory in a buffer, a mean over the batch that begins late; in Python an array in a
# dict, a generator, and an iterator. (A float is in `changed`.)
SOME = ["late_noise", "queue", "mixed_late"]
KEPT, MOVING = ["kept_in_a_table", "layer_drop", "by_turns"], ["layer_drop", "by_turns"]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    folder = str(tmp_path_factory.mktemp("claims"))
    return run_ranks(all_of_it, 2, folder, KEPT, SOME, MOVING, timeout=400)


def check_claims(screens: dict[str, str]) -> None:
    """No false model is called one process's."""
    for name, screen in screens.items():
        assert "same global batches" in screen or "Error" in screen, (name, screen)
        for line in screen.splitlines():
            assert "as on one process" not in line, (name, line)
            assert "one process's result" not in line or "the proof    none" in line, (name, line)


def check_kept(screens: dict[str, str], names: list[str]) -> None:
    for name in names:
        assert "not known: the value of model." in screens[name], (name, screens[name])


def test_no_training_claims_what_nobody_has_proven(told: list[list[Any]]) -> None:
    """Of false models none is called one process's, and no honest one either: a script has no proof."""
    false, other, change, _ = told[0]
    screens = {name: screen for name, (screen, _) in false.items()} | other | change
    assert len(screens) == 15
    check_claims(screens)
    check_kept(screens, [*KEPT, "in Python"])
    assert "not as one process computes it" not in screens["honest"]


@pytest.mark.long
def test_nor_do_trainings_of_other_false_models(tmp_path: Path) -> None:
    names = [lie.__name__ for lie in LIES if lie.__name__ not in (*KEPT, *SOME)]
    screens = {
        name: screen
        for name, (screen, _) in run_ranks(liars, 2, str(tmp_path), names, timeout=400)[0].items()
    }
    assert len(screens) == 7
    check_claims(screens)
    check_kept(screens, ["mean_as_float", "kept_in_a_list", "drop_by_numpy"])


def test_what_is_changed_on_one_rank_is_named_at_the_next_check(told: list[list[Any]]) -> None:
    """With the layer and the ranks; what forward itself changes is told, and trained on."""
    screens = told[0][2]
    for name, sentence in (
        ("set_rate", "after step 6: ranks differ in p of model.drop: 0.0 on rank 0, 0.5 on rank 1. "),
        (
            "add_hook",
            "after step 6: ranks differ in the hooks of model.first: none on rank 0, add_hook.<locals>.<lambda> on",
        ),
        (
            "to_evaluation",
            "after step 6: ranks differ in the mode of model.drop: training on rank 0, evaluation on rank 1. ",
        ),
        ("set_loss", "after step 6: ranks differ in ignore_index of loss: -100 on rank 0, 1 on rank 1. "),
        (
            "set_learning_rate",
            "after step 6: ranks differ in the learning rate: 0.001 on rank 0, 0.0015 on rank 1. Their updates",
        ),
    ):
        assert sentence in screens[name], screens[name]
    told = "model.mean is another one on each rank: forward changes it, in plain Python"
    assert f"after step 3: {told}" in screens["in Python"]
    assert (
        f"  can differ: {told}" in screens["in Python"].partition("shared weights bit-equal after step 10")[2]
    )


@pytest.mark.parametrize("name", [*MOVING, pytest.param("drop_by_numpy", marks=pytest.mark.long)])
def test_a_model_with_a_generator_of_its_own_learns_the_same_with_and_without_a_trial(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """And the same as one process, which draws as often."""
    if name in MOVING:
        ranks = request.getfixturevalue("told")
    else:
        ranks = run_ranks(all_of_it, 2, str(tmp_path / "two"), [name], [], [name], timeout=400)
    (alone,) = run_ranks(liars, 1, str(tmp_path / "one"), [name])
    for false, _, _, untried_weights in ranks:
        tried = false[name][1]
        assert tried == untried_weights[name]
        for weights, ones in zip(tried, alone[name][1], strict=True):
            np.testing.assert_allclose(weights, ones, rtol=1e-4, atol=1e-6)
