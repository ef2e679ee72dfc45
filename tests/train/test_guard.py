"""An update whose numbers are wrong is stopped at, skipped or undone: alike in all layouts, resumed or not."""

from __future__ import annotations

import io
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.assembly.trainer import Trainer
from paddle_dp.checkpoint import checkpoints, load, newest
from paddle_dp.checks.repeats import find_not_finite
from paddle_dp.data import Loader
from paddle_dp.data.sampler import Sampler
from paddle_dp.errors import NotFiniteError, RecipeError, SpikeError, UsageError
from paddle_dp.mesh import Mesh
from paddle_dp.recipe import Guard
from paddle_dp.train import Callback, blame
from paddle_dp.train.judge import FLOOR, WARM_UP, WINDOW, LossGuard
from paddle_dp.units import Sigmas
from tests.house.programs import run_python
from tests.house.runs import events, saved_bits
from tests.house.training import build_trainer
from tests.parity import assert_same_weights
from tests.ranks import run_ranks
from tests.train.poisoned import Images

BATCH, BAD = 8, 13
SAMPLER = Sampler(30, BATCH, seed=3)


def steps_of(sample: int, epochs: int = 3) -> list[int]:
    """The steps that read a sample, from 1."""
    at = [np.flatnonzero(SAMPLER.order(epoch) == sample)[0] // BATCH for epoch in range(epochs)]
    return [int(epoch * SAMPLER.batches + batch + 1) for epoch, batch in enumerate(at)]


def judge(**guard: Any) -> LossGuard:
    return LossGuard(Guard(non_finite="skip", **guard))


def approves(judged: LossGuard, loss: float, norm: float = 1.0) -> bool:
    return judged.approve({"loss": loss, "gradient_norm": norm})


class TestJudge:
    def test_not_finite(self):
        judged = judge()
        assert approves(judged, 1.0) and not judged.why
        assert not approves(judged, math.nan) and judged.why == "the loss is nan"
        assert not approves(judged, 1.0, math.inf) and judged.why == "the gradient norm is inf"

    def test_with_a_loss_scale_gradients_may_overflow_and_the_loss_may_not(self):
        judged = LossGuard(Guard(non_finite="stop"), scaled=True)
        assert approves(judged, 1.0, math.inf)
        assert not approves(judged, math.inf, math.inf)

    def test_a_spike_is_so_many_deviations_above_the_mean_of_the_last_losses(self):
        judged, losses = judge(spike=Sigmas(5.0)), [2 + math.sin(n) for n in range(150)]
        for number, loss in enumerate(losses):
            assert (judged.limit() is None) == (number < WARM_UP)
            assert approves(judged, loss)
        last = np.array(losses[-WINDOW:])
        limit = last.mean() + 5 * last.std(ddof=1)
        assert judged.limit() == pytest.approx(limit, rel=1e-12)
        assert (
            not approves(judged, limit * 1.001)
            and "a spike: 5 sigma above the mean of the last 100" in judged.why
        )
        assert judged.limit() == pytest.approx(limit, rel=1e-12), "a refused loss does not count"
        assert approves(judged, limit * 0.999) and approves(judged, 0.0)

    def test_rounding_of_a_constant_loss_is_no_spike(self):
        judged = judge(spike=Sigmas(5.0))
        for _ in range(50):
            assert approves(judged, 0.7)
        assert approves(judged, 0.7 * (1 + 4.9 * FLOOR)) and not approves(judged, 0.8)

    def test_refusals_in_a_row(self):
        judged = judge(in_a_row=2)
        assert [judged.count_refusal(step) for step in (5, 6, 7)] == [False, False, True]
        judged.count_update(6)  # after going back, an earlier step proves nothing
        assert judged.count_refusal(8)
        judged.count_update(9)
        assert not judged.count_refusal(10)

    def test_it_goes_on_from_its_state(self):
        judged = judge(spike=Sigmas(4.0))
        for number in range(30):
            approves(judged, 1 + 0.1 * math.cos(number))
        judged.count_refusal(31)
        judged.left_out.add((2, 5))
        again = judge(spike=Sigmas(4.0))
        again.load(json.loads(json.dumps(judged.state())))
        assert again == judged and again.limit() == judged.limit()
        assert LossGuard(Guard()).state() is None

    def test_after_going_back_it_leaves_out_one_batch_more(self):
        judged = judge(spike=Sigmas(4.0))
        approves(judged, 1.0)
        before = judged.state()
        approves(judged, 2.0)
        judged.count_refusal(3)
        judged.left_out.add((0, 1))
        judged.go_back(before, (0, 2))
        assert (judged.left_out, judged.in_a_row, list(judged._losses)) == ({(0, 1), (0, 2)}, 1, [1.0])


def test_a_spike_without_a_word_on_what_to_do_is_refused():
    with pytest.raises(ValueError, match="needs non_finite"):
        Guard(spike=Sigmas(5.0))


def test_in_python_it_is_read_as_in_a_recipe(tmp_path):
    with pytest.raises(RecipeError, match=r"guard\.non_finite"):
        trainer(tmp_path, guard={"non_finite": "ignore"})
    with pytest.raises(UsageError, match="no callback saves"):
        trainer(tmp_path, guard={"non_finite": "rewind"}, callbacks=["metrics"])


def model() -> nn.Layer:
    paddle.seed(5)
    convolution = [nn.Conv2D(1, 4, 3), nn.BatchNorm2D(4), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*convolution, nn.Linear(144, 8), nn.Tanh(), nn.Linear(8, 4))


def schedule() -> Any:
    return paddle.optimizer.lr.CosineAnnealingDecay(0.05, 12)


def optimizer(rate: Any, named: Any) -> Any:
    return paddle.optimizer.Momentum(rate, parameters=[p for _, p in named])


def trainer(folder: Path, bad: Any = (BAD,), data: Any = None, callbacks: Any = None, **more: Any) -> Trainer:
    saving = ["metrics", {"use": "checkpoint", "every": "3 steps", "keep": 9}]
    how: dict[str, Any] = {"length": "12 steps", "guard": {"non_finite": "skip"}} | more
    return Trainer.of(
        model=how.pop("net", None) or model(), loss="cross_entropy",
        train=data or Images(30, bad), batch=BATCH, seed=3, folder=folder, schedule=schedule(), optimizer=optimizer,
        callbacks=saving if callbacks is None else callbacks, **how,
    )  # fmt: skip


def in_plain_paddle() -> dict[str, np.ndarray]:
    """12 updates, but those that read the bad sample."""
    net, rate, data = model(), schedule(), Images(30, (BAD,))
    update, cross_entropy = optimizer(rate, net.named_parameters()), nn.CrossEntropyLoss()
    for step in range(12):
        indices = SAMPLER.global_batch(*divmod(step, SAMPLER.batches))
        if BAD not in indices:
            inputs, targets = paddle.to_tensor(data.images[indices]), paddle.to_tensor(data.classes[indices])
            cross_entropy(net(inputs), targets).backward()
            update.step()
            update.clear_grad()
        rate.step()
    return {name: tensor.numpy() for name, tensor in net.state_dict().items()}


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    """A training that skips, where it stands, its folder, and what it said on standard error."""
    folder, said = tmp_path_factory.mktemp("skipped"), io.StringIO()
    with redirect_stderr(said):
        done = trainer(folder)
        progress = done.fit()
    return done, progress, folder, said.getvalue()


def test_skipped_it_is_as_if_the_batch_had_not_been(skipped):
    """Weights, momentum, running statistics; the schedule goes on. On the screen and in metrics.jsonl it stands."""
    done, progress, folder, said = skipped
    assert (progress.step, progress.samples) == (12, 90)
    for name, value in in_plain_paddle().items():
        np.testing.assert_allclose(
            dict(done.learner.placed.state())[name].numpy(), value, rtol=2e-6, err_msg=name
        )
    refused = events(folder, "refused")
    assert [line["step"] for line in refused] == steps_of(BAD)
    for line in refused:
        assert (
            BAD in line["samples_of_batch"] and line["action"] == "skip" and line["why"] == "the loss is nan"
        )
        assert line["loss"] is None and "The inputs are not finite: 1 NaN of" in line["first"]
        assert line["sample"] == f"sample {BAD} has inputs that are not finite"
    named = f"Look at the data: sample {BAD} has inputs that are not finite. The inputs are not finite: 1 NaN"
    assert f"step {steps_of(BAD)[0]}: the loss is nan: the update was skipped. {named}" in said


def test_gone_back_it_is_the_same_as_skipped(skipped, tmp_path, capsys):
    """Bit by bit, for here the weights were good before; also where a checkpoint did not exist yet. Each step stands
    once in the metrics."""
    saving = [{"use": "metrics", "every": "1 step"}, {"use": "checkpoint", "every": "3 steps", "keep": 9}]
    trainer(tmp_path, guard={"non_finite": "rewind"}, callbacks=saving).fit()
    assert saved_bits(tmp_path) == saved_bits(skipped[2])
    assert [line["step"] for line in events(tmp_path, "step")] == sorted(
        set(range(1, 13)) - set(steps_of(BAD))
    )
    state = load(newest(tmp_path / "checkpoints")).state
    late = [step for step in steps_of(BAD) if step > 3]
    assert state["guard"]["left_out"] == [list(divmod(step - 1, SAMPLER.batches)) for step in late]
    said = capsys.readouterr().err
    assert all(f"step {step}: the loss is nan: back to the checkpoint of step" in said for step in late)
    assert said.count(f"sample {BAD} has inputs that are not finite") == len(steps_of(BAD))
    assert (steps_of(BAD)[0] > 3) or "there is no checkpoint to go back to yet" in said


def test_it_does_not_go_back_to_a_checkpoint_of_an_abandoned_training(tmp_path, capsys):
    """One that was told to go on from an earlier checkpoint than the folder's newest."""
    step = next(step for step in steps_of(BAD) if step > 4)
    saving = [{"use": "checkpoint", "every": "4 steps"}]
    how = {"guard": {"non_finite": "rewind"}, "callbacks": saving, "length": f"{step + 1} steps"}
    often = [{"use": "checkpoint", "every": "1 step", "keep": 9}, Poison(5)]
    trainer(tmp_path, **{**how, "callbacks": often, "length": f"{step - 1} steps"}).fit()
    fourth = tmp_path / "checkpoints/step-00000004"
    capsys.readouterr()
    trainer(tmp_path, **how, resume=str(fourth)).fit()
    assert f"step {step}: the loss is nan: back to the checkpoint of step 4." in capsys.readouterr().err


class Removes(Callback):
    """Removes the resumed checkpoint, as `memory_checkpoint` does after two later ones."""

    def __init__(self, folder: Path):
        self.folder = folder

    def start(self, moment):
        shutil.rmtree(self.folder)


def test_it_does_not_go_back_to_a_resumed_checkpoint_that_is_gone(tmp_path, capsys):
    step = next(step for step in steps_of(BAD) if step > 4)
    trainer(tmp_path / "memory", callbacks=[{"use": "checkpoint", "every": "4 steps"}]).fit("4 steps")
    fourth = tmp_path / "memory/checkpoints/step-00000004"
    callbacks = [{"use": "checkpoint", "every": "99 steps"}, Removes(fourth)]
    trainer(tmp_path / "run", guard={"non_finite": "rewind"}, callbacks=callbacks, resume=str(fourth)).fit()
    skipped = (
        f"step {step}: the loss is nan: the update was skipped, for there is no checkpoint to go back to yet"
    )
    assert skipped in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_a_bad_sample_of_any_micro_batch_is_named(dtype):
    """By its place in the global batch; a large number is none, and targets are looked at, too."""
    pairs = [(np.full(2, 1e300 if dtype == "float64" else 1.0), np.float32(0.0)) for _ in range(30)]
    loader, mesh = Loader.plain(pairs, batch=BATCH, micro_batches=3, seed=3), Mesh.alone()

    def cast(batch: Any) -> Any:
        parts = [replace(m, inputs=m.inputs.astype(dtype)) for m in batch.micro_batches]
        return replace(batch, micro_batches=tuple(parts))

    assert blame.in_batch(loader, cast(next(loader.read(0))), mesh) == ""
    last = int(loader.sampler.global_batch(0, 0)[BATCH - 1])
    pairs[last] = (pairs[last][0], np.float32("nan"))
    said = blame.in_batch(loader, cast(next(loader.read(0))), mesh)
    assert said == f"sample {last} has targets that are not finite"
    pairs[last] = (np.array([1.0, -math.inf]), np.float32("nan"))
    said = blame.in_batch(loader, cast(next(loader.read(0))), mesh)
    assert said == f"sample {last} has inputs that are not finite"


def test_stopped_nothing_bad_is_saved_and_the_error_says_where(tmp_path):
    step = steps_of(BAD)[0]
    with pytest.raises(NotFiniteError) as error:
        trainer(
            tmp_path, guard={"non_finite": "stop"}, callbacks=[{"use": "checkpoint", "every": "1 step"}]
        ).fit()
    said = str(error.value)
    assert said.startswith(
        f"the loss is nan at step {step}: this update was not made (guard.non_finite: stop)."
    )
    assert "The inputs are not finite: 1 NaN of 512, in micro-batch 1." in said
    assert f"Sample {BAD} of the training data, read in step {step}, has inputs that are not finite" in said
    assert all(str(index) in said for index in SAMPLER.global_batch(0, step - 1))
    assert len(checkpoints(tmp_path / "checkpoints")) == step - 1


class Root(nn.Layer):
    """The square root of the third number: NaN where it is negative."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return paddle.concat([x[:, :2], x[:, 2:3].sqrt(), x[:, 3:]], axis=1)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_first_layer_is_named_and_nothing_is_changed_by_looking(tmp_path, micro_batches):
    paddle.seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1D(6), Root(), nn.Linear(6, 4))
    made = Trainer.of(
        model=net, loss="cross_entropy", train=Images(30), batch=BATCH, folder=tmp_path,
        optimizer=optimizer, schedule=schedule(), micro_batches=micro_batches, callbacks=[], length="1 step",
    )  # fmt: skip
    before = {name: tensor.numpy() for name, tensor in net.state_dict().items()}
    batch = next(iter(made.loader.read(0)))
    said = find_not_finite(made.learner, batch)
    assert said.startswith("The first output that is not finite is from 3: "), said
    for name, tensor in net.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), before[name], err_msg=name)


def test_a_loss_far_above_those_before_is_skipped(tmp_path):
    """First in step 26 of 30 an epoch, so that the losses before it are known."""
    sampler = Sampler(240, BATCH, seed=3)
    far = int(sampler.global_batch(0, 25)[0])
    again = 31 + int(np.flatnonzero(sampler.order(1) == far)[0]) // BATCH
    guard = {"non_finite": "skip", "spike": "5 sigma"}
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
    trainer(
        tmp_path, data=Images(240, (), (far,)), net=net, length="60 steps", guard=guard, callbacks=["metrics"]
    ).fit()
    refused = events(tmp_path, "refused")
    assert [line["step"] for line in refused] == [26, again]
    assert all("is a spike: 5 sigma above" in line["why"] and line["loss"] > 2 for line in refused)
    assert not any(line["first"] for line in refused)


def test_too_many_in_a_row_end_it(tmp_path):
    with pytest.raises(NotFiniteError, match=r"refusal number 3 without a good update.*in_a_row allows 2"):
        trainer(tmp_path, range(30), guard={"non_finite": "skip", "in_a_row": 2}).fit()
    with pytest.raises(SpikeError):
        trainer(
            tmp_path / "spike", (), length="60 steps",
            guard={"non_finite": "stop", "spike": "5 sigma"},
            callbacks=[Poison()],
        ).fit()  # fmt: skip


class Poison(Callback):
    """After that step the weights are others."""

    reads = False

    def __init__(self, at: int = 30):
        self.at = at

    def step(self, moment: Any) -> None:
        if moment.progress.step == self.at:
            with paddle.no_grad():
                for _, parameter in moment.trainer.learner.placed.named_parameters():
                    parameter.set_value(parameter * 50)


RECIPE = """
model: {{use: vit, image: 8, patch: 4, channels: 1, width: 16, depth: 2, heads: 2, classes: 4, dropout: 0.1}}
dataset: {{use: tests.train.poisoned.Dataset, bad: [13]}}
loss: {{use: cross_entropy}}
optimizer: {{use: adamw, clip: 0.5}}
schedule: {{use: cosine, learning_rate: 3.0e-3, warmup: 3 steps}}
strategy: {strategy}
train: {{length: 12 steps, batch: 8, micro_batches: 2, seed: 3}}
guard: {{non_finite: {action}}}
callbacks:
  - {{use: metrics, every: 1 step}}
  - {{use: checkpoint, every: 3 steps, keep: 9}}
"""


def train(folder: str, strategy: str, action: str, until: str = "12 steps") -> str:
    """In every rank: trains from the newest checkpoint, if there is one. The newest checkpoint then."""
    folder_of_checkpoints = Path(folder) / "checkpoints"
    resume = bool(checkpoints(folder_of_checkpoints))
    build_trainer(RECIPE.format(strategy=strategy, action=action), folder, resume=resume).fit(until)
    return str(newest(folder_of_checkpoints))


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process that skips."""
    folder = tmp_path_factory.mktemp("alone")
    run_ranks(train, 1, str(folder), "{use: single}", "skip")
    return folder


def assert_same(many: Path, one: Path) -> None:
    ours, theirs = (
        {line["step"]: [line["loss"], line["gradient_norm"]] for line in events(run, "step")}
        for run in (many, one)
    )
    assert ours.keys() == theirs.keys() == set(range(1, 13)) - set(steps_of(BAD))
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-5)
    assert {line["sample"] for line in events(many, "refused") if not line["again"]} == {
        f"sample {BAD} has inputs that are not finite"
    }
    assert_same_weights(*(str(newest(run / "checkpoints")) for run in (many, one)), atol=2e-5)


LAYOUTS = {
    "{use: data_parallel}": 2,
    "{use: hybrid, tensor: 2}": 2,
    "{use: hybrid, pipeline: 2}": 2,
    "{use: hybrid, pipeline: 2, pipeline_schedule: interleaved, virtual_stages: 2}": 2,
    "{use: hybrid, sharding: 3, sharding_stage: 2}": 3,
    "{use: hybrid, sharding: 3, sharding_stage: 3}": 3,
    "{use: hybrid, tensor: 2, pipeline: 2}": 4,
}


@pytest.mark.long
@pytest.mark.parametrize("action", ["skip", "rewind"])
@pytest.mark.parametrize("strategy", LAYOUTS)
def test_every_layout_is_one_process(tmp_path, alone, strategy, action):
    run_ranks(train, LAYOUTS[strategy], str(tmp_path), strategy, action, timeout=240)
    assert_same(tmp_path, alone)


@pytest.mark.long
def test_killed_between_a_rewind_and_the_next_checkpoint_it_goes_on_bit_by_bit(tmp_path):
    """Two ranks, kill -9 of all processes of the job as soon as it has gone back; then --resume."""
    import psutil

    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(strategy="{use: data_parallel}", action="rewind"))
    settings = ["dataset.samples=400", "train.length=100 steps"]
    words = ["-m", "paddle_dp", "train", str(recipe), "--ranks", "2", *settings, "--out"]
    run_python(*words, tmp_path / "whole", timeout=120)
    command, out = [sys.executable, *words], tmp_path / "killed"
    job = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or all(
        line["action"] != "rewind" for line in events(out, "refused")
    ):
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    for process in [*psutil.Process(job.pid).children(recursive=True), psutil.Process(job.pid)]:
        process.send_signal(signal.SIGKILL)
    job.wait()
    assert load(newest(out / "checkpoints")).state["progress"]["step"] < 100
    run_python(*words, out, "--resume", timeout=120)
    assert saved_bits(out) == saved_bits(tmp_path / "whole")
    ours, theirs = (
        [[x["step"], x["loss"]] for x in events(run, "step")] for run in (out, tmp_path / "whole")
    )
    assert ours == theirs
