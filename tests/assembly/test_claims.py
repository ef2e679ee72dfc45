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

from paddle_dp.assembly import assemble
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.errors import DivergenceError
from paddle_dp.train import Callback, Moment
from tests.house.datasets import Samples
from tests.ranks import run_ranks

pytestmark = pytest.mark.processes
STEPS, CLASSES = 10, 4


def point(i: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.RandomState(i).randn(6).astype("float32")
    return numbers, np.asarray(numbers[:CLASSES].argmax())


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


LIES = [
    late_noise, growing_dropout, late_numpy, queue, mean_as_float, kept_in_a_list, kept_in_a_table, layer_drop,
    drop_by_numpy, by_turns, mixed_for_a_while, mixed_late, balanced_late,
]  # fmt: skip
CHANGES = [set_rate, add_hook, to_evaluation, set_learning_rate]


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


def liars(folder: str, lies: list[str]) -> dict[str, str]:
    """In each rank: the screens of these."""
    found = {}
    for lie in (lie for lie in LIES if lie.__name__ in lies):
        paddle.seed(1)
        found[lie.__name__] = fit(f"{folder}/{lie.__name__}", Liar(lie))[0]
    return found


def others(folder: str, changes: list[str]) -> dict[str, str]:
    """In each rank: the screens of a loss, of callbacks and of layers that are not one process's, and of an honest
    model."""
    found = {"late loss": fit(f"{folder}/loss", Liar(), LateLoss())[0]}
    for change in (change for change in CHANGES if change.__name__ in changes):
        found[change.__name__] = fit(f"{folder}/{change.__name__}", Liar(), change=change)[0]
    chain = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, CLASSES))
    again = {"use": "data_parallel", "recompute": "full"}
    found["spectral norm"] = fit(f"{folder}/spectral", chain, strategy=again)[0]
    found["honest"] = fit(f"{folder}/honest", Liar())[0]
    return found


def check_claims(screens: dict[str, str]) -> None:
    """No false model is called one process's."""
    for name, screen in screens.items():
        assert "same global batches" in screen or "Error" in screen, (name, screen)
        for line in screen.splitlines():
            assert "as on one process" not in line, (name, line)
            assert "one process's result" not in line or "the proof    none" in line, (name, line)


KEPT = ["mean_as_float", "kept_in_a_list", "kept_in_a_table", "layer_drop", "drop_by_numpy", "by_turns"]
# One of each kind: numbers drawn late, memory in a buffer, a mean over the batch that begins late.
SOME = ["late_noise", "queue", "mixed_late"]


def test_no_training_claims_what_nobody_has_proven(tmp_path: Path) -> None:
    """Of false models none is called one process's, and no honest one either: a script has no proof."""
    screens, _ = run_ranks(liars, 2, str(tmp_path), [*KEPT, *SOME], timeout=400)
    assert len(screens) == 9
    screens |= run_ranks(others, 2, str(tmp_path), ["set_rate"])[0]
    assert len(screens) == 13
    check_claims(screens)
    for name in KEPT:
        assert "not known: the value of model." in screens[name], (name, screens[name])
    assert "not as one process computes it" not in screens["honest"]


@pytest.mark.long
def test_nor_do_trainings_of_other_false_models(tmp_path: Path) -> None:
    names = [lie.__name__ for lie in LIES if lie.__name__ not in (*KEPT, *SOME)]
    screens, _ = run_ranks(liars, 2, str(tmp_path), names, timeout=400)
    assert len(screens) == 4
    screens |= run_ranks(others, 2, str(tmp_path), [change.__name__ for change in CHANGES])[0]
    check_claims(screens)


def changed(folder: str) -> dict[str, str]:
    found = {}
    for change in (*CHANGES, None):
        paddle.seed(1)
        every = {"use": "data_parallel", "check_every": "3 steps"}
        lie = None if change else mean_as_float
        name = change.__name__ if change else "in Python"
        found[name] = fit(f"{folder}/{name}", Liar(lie), change=change, strategy=every)[0]
    return found


def test_what_is_changed_on_one_rank_is_named_at_the_next_check(tmp_path: Path) -> None:
    """With the layer and the ranks; what forward itself changes is told, and trained on."""
    screens = run_ranks(changed, 2, str(tmp_path))[0]
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
        (
            "set_learning_rate",
            "after step 6: ranks differ in the learning rate: 0.001 on rank 0, 0.0015 on rank 1. Their updates",
        ),
    ):
        assert sentence in screens[name], screens[name]
    told = "model.mean is another one on each rank: forward changes it, in plain Python"
    assert f"after step 3: {told}" in screens["in Python"]
    assert f"  - {told}" in screens["in Python"].partition("shared weights bit-equal after step 10")[2]


def moved(folder: str) -> list[Any]:
    """The weights after a training of models with generators of their own: tried before, and not."""
    found = []
    for lie in (layer_drop, drop_by_numpy, by_turns):
        both = []
        for tried in (True, False):
            own = assemble.TrainerBuilder._tried
            if not tried:
                assemble.TrainerBuilder._tried = lambda self, task: task  # type: ignore[method-assign]
            try:
                paddle.seed(1)
                both.append(fit(f"{folder}/{lie.__name__}-{tried}", Liar(lie))[1])
            finally:
                assemble.TrainerBuilder._tried = own  # type: ignore[method-assign]
        found.append(both)
    return found


def test_a_model_with_a_generator_of_its_own_learns_the_same_with_and_without_a_trial(tmp_path: Path) -> None:
    """And the same as one process, which draws as often."""
    ranks, (alone,) = run_ranks(moved, 2, str(tmp_path / "two")), run_ranks(moved, 1, str(tmp_path / "one"))
    for rank in ranks:
        for (tried, untried), (one, _) in zip(rank, alone, strict=True):
            assert tried == untried
            for weights, ones in zip(tried, one, strict=True):
                np.testing.assert_allclose(weights, ones, rtol=1e-4, atol=1e-6)
