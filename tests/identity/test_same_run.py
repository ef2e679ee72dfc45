"""What a resume may find otherwise than in the checkpoint, what it may not, and what it says."""

from __future__ import annotations

import importlib
import json
import linecache
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp import checkpoint as checkpoints
from paddle_dp.assembly.assemble import TrainerBuilder
from paddle_dp.assembly.build import build
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.checkpoint.disk import digest_of
from paddle_dp.checkpoint.manifest import MANIFEST, STATE, read_manifest
from paddle_dp.errors import CheckpointError, UsageError
from paddle_dp.identity.same_run import RULES, load_schedule
from paddle_dp.identity.source_code import script_code
from paddle_dp.mesh import join
from paddle_dp.recipe import read_recipe
from paddle_dp.schedules.cosine import Config
from paddle_dp.train.callback import Callback
from tests.house import datasets as house
from tests.house.recipes import small_recipe
from tests.ranks import run_ranks

RECIPE = small_recipe(
    "length: 20 steps, batch: 50, micro_batches: 2", model="mlp, inputs: 64, hidden: [8], classes: 10",
    optimizer="adamw, clip: 1.0", schedule="cosine, learning_rate: 2.0e-3, warmup: 2 steps",
    callbacks="[{use: checkpoint, every: 20 steps}]",
)  # fmt: skip
FEW = 6  # updates before the checkpoint


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial of the model in a process of its own: these trainings, good and bad, are compared, and not judged."""
    monkeypatch.setattr(TrainerBuilder, "_tried", lambda self, task: task)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, and beside it the run that went six steps of its way."""
    folder = tmp_path_factory.mktemp("same_run")
    (folder / "recipe.yaml").write_text(RECIPE)
    again(folder, resume=None).fit(f"{FEW} steps")
    return folder


def again(folder: Path, *words: str, resume: str | None = "newest", **how: Any) -> Trainer:
    recipe = read_recipe(folder / "recipe.yaml", [f"output_dir={folder / 'run'}", *words])
    return build(recipe, join(recipe.train.seed), resume, **how)


def test_nothing_changed_is_nothing_said(run: Path) -> None:
    trainer = again(run)
    assert trainer.progress.step == FEW and trainer.run.changes == ()


LR = paddle.optimizer.lr


class LongerRestarts(LR.CosineAnnealingWarmRestarts):
    """Its periods get longer by a rule that it saves itself."""

    def state_keys(self) -> None:
        self.keys = ["last_epoch", "last_lr", "T_cur", "T_i"]

    def step(self, epoch: int | None = None) -> None:
        length = self.T_i
        super().step(epoch)
        if self.T_i != length or self.T_cur == 0:
            self.T_i = length + 2


SCHEDULES: dict[str, Callable[[], Any]] = {
    "restarts": lambda: LR.CosineAnnealingWarmRestarts(0.5, 4),
    "longer restarts": lambda: LR.CosineAnnealingWarmRestarts(0.5, 1, T_mult=3),
    "restarts of its own": lambda: LongerRestarts(0.5, 3),
    "restarts after a warm-up": lambda: LR.LinearWarmup(LR.CosineAnnealingWarmRestarts(0.5, 3), 4, 0.0, 0.5),
    "cosine": lambda: LR.CosineAnnealingDecay(0.5, 4, 0.1),
    "products": lambda: LR.MultiplicativeDecay(0.5, lambda epoch: 0.9 + 0.01 * epoch),
    "one cycle": lambda: LR.OneCycleLR(1.0, 20, three_phase=True),
    "cycles": lambda: LR.CyclicLR(0.1, 0.5, 3, mode="triangular2"),
    "polynomial": lambda: LR.PolynomialDecay(0.5, 5, cycle=True),
}


@pytest.mark.filterwarnings("ignore:There are some unused values")  # Paddle's, of a schedule within one
@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_of_paddle_goes_on_bit_by_bit(make: Callable[[], Any]) -> None:
    """The state of CosineAnnealingWarmRestarts lacks where it is in its period: other rates, silently."""
    whole, saved, resumed = make(), make(), make()
    rates = []
    for step in range(20):
        rates.append(whole())
        whole.step()
        if step < 6:
            saved.step()
    load_schedule(resumed, {"schedule": saved.state_dict(), "progress": {"step": 6}})
    for rate in rates[6:]:
        assert resumed() == rate
        resumed.step()


def test_another_number_of_threads_is_told(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes the last bits of products: on 2 nodes of 1 rank, a rank has more of them than on 1 node of 2."""
    before = os.environ.get("OMP_NUM_THREADS", "not there")
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert again(run).run.changes == (f"threads was {before} and is 9",)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 9}, r"was saved by paddle_dp 0\.9 \(its files: 1\) in format 9.* reads format 1: install that"),
        ({"axes": None}, r"makes no sense \('axes' is missing\)"),
        ({"progress": {"step": FEW, "batch": FEW, "epoch": 0}}, "progress has batch, epoch, step, not batch, epoch, s"),
        ({"progress": {"step": FEW, "tokens": 9}}, "progress has step, tokens, not batch, epoch, samples, step"),
        ({"identity": None}, r"lacks its run's identity, .* give load\.path=.*step-"),
    ],
)  # fmt: skip
def test_a_state_that_this_version_does_not_restore_is_refused(
    run: Path, tmp_path: Path, change: Any, said: str
) -> None:
    saved = copy_of(
        run, tmp_path, {"identity": {"facts": {"package paddle_dp": "0.9 (its files: 1)"}}, **change}
    )
    with pytest.raises(CheckpointError, match=f"{saved} .*{said}"):
        again(run, resume=str(saved))


def copy_of(run: Path, folder: Path, change: dict[str, Any]) -> Path:
    """The run's checkpoint with another state, whole: its manifest says so."""
    saved = checkpoints.newest(run / "run" / "checkpoints")
    assert saved is not None
    shutil.copytree(saved, folder / saved.name)
    file = folder / saved.name / STATE
    state = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))
    manifest = read_manifest(saved)
    (file.parent / MANIFEST).unlink()
    replace(manifest, files={**manifest.files, STATE: digest_of(file)}).write(file.parent)
    return file.parent


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train.micro_batches=1", ["train.micro_batches was 2 and is 1"]),
        # there is none
        ("strategy.sync_batch_norm=false", ["strategy.sync_batch_norm was true and is false"]),
        ("train.drop_last=true train.batch=50 dataset.held_out=0.2", None),
        ("name=other loader.num_workers=1 callbacks.checkpoint.keep=1 train.patience=9s", []),
        ("train.max_time=9h watch.patience=99s watch.start=9s", []),
        (
            "evaluation.samples=100 evaluation.batch=20",
            ["evaluation.batch was null and is 20", "evaluation.samples was null and is 100"],
        ),
    ],
)
def test_what_may_change(run: Path, words: str, said: list[str] | None) -> None:
    if said is None:  # 1437 samples are 28 batches of 50 and 37: without the short one, it is another run
        with pytest.raises(
            UsageError,
            match=r"train\.drop_last was false and is true\. Give .* for a new run \(.*\)\. To begin a new run",
        ):
            again(run, *words.split())
    else:
        assert list(again(run, *words.split()).run.changes) == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.dropout=0.1", "model.dropout was 0.0 and is 0.1"),
        ("loss.label_smoothing=0.1", "loss.label_smoothing was 0.0 and is 0.1"),
        ("optimizer.clip=0.5", "optimizer.clip was 1.0 and is 0.5"),
        ("train.precision=bfloat16", "train.precision was float32 and is bfloat16"),
        ("train.dropout=own", "train.dropout was exact and is own"),
        (
            "schedule.learning_rate=1e-3",
            r"schedule.learning_rate was 0.002 and is 0.001 (update 1: rate 0.000666667, and now 0.000333333)",
        ),
        ("train.length=30steps", "train.length was 20 steps and is 30 steps (update 4: rate"),
        (
            "schedule={use: polynomial, learning_rate: 2.0e-3, warmup: 2 steps}",
            "schedule was cosine and is polynomial (update",
        ),
    ],
)
def test_what_makes_it_another_run_is_refused_by_key_and_accepted_by_key(
    run: Path, words: str, said: str
) -> None:
    with pytest.raises(UsageError, match="cannot be resumed as the same run: " + re.escape(said)) as refused:
        again(run, words)
    key = re.search(
        r"or accept it: --accept (\S+), or leave .* docs/checks.md lists what may change freely",
        str(refused.value),
    )
    assert key is not None
    trainer = again(run, words, accept=key[1].split(","))
    assert trainer.run.changes[0].startswith(said) and trainer.run.identity is not None
    (taken,) = trainer.run.identity.accepted
    assert (taken["step"], taken["key"]) == (FEW, key[1]) and taken["was"] != taken["is"]


def rate_of(trainer: Trainer) -> float:
    """Of the next update, which the optimizer has, too."""
    rate = float(trainer.learner.rate.schedule())
    assert trainer.learner.optimizer.get_lr() == rate
    return rate


@pytest.fixture(scope="module")
def of_checkpoint(run: Path) -> float:
    """The rate of the next update where nothing is changed."""
    return rate_of(again(run))


@pytest.mark.parametrize(
    "words",
    [
        "schedule.learning_rate=1e-3",
        "train.length=30steps",
        "schedule={use: polynomial, learning_rate: 2.0e-3, warmup: 2 steps}",
        "schedule={use: plateau, learning_rate: 1.0e-3}",
    ],
)
def test_an_accepted_schedule_has_its_own_rate_from_the_first_update_on(
    run: Path, of_checkpoint: float, words: str
) -> None:
    trainer = again(run, words, accept=["schedule", "train.length"])
    schedule, first = trainer.learner.rate.schedule, rate_of(trainer)
    assert schedule.last_epoch == FEW and first != of_checkpoint
    schedule.step(FEW)
    assert schedule() == first


def test_a_plateau_with_another_peak_keeps_its_share(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("use: cosine", "use: plateau"))
    trainer = again(tmp_path, resume=None)
    trainer.learner.rate.schedule.share = 0.1
    trainer.fit(f"{FEW} steps")
    trainer = again(tmp_path, "schedule.learning_rate=1e-3", accept=["schedule"])
    assert rate_of(trainer) == 1e-3 * 0.1


def test_what_cannot_go_on_cannot_be_accepted(run: Path) -> None:
    for words, said in (
        ("train.batch=25", "train.batch was 50 and is 25"),
        ("optimizer={use: sgd}", "optimizer was adamw and is sgd"),  # its states cannot be read
        ("train.seed=7", "train.seed was 0 and is 7"),
        ("dataset.held_out=0.3", "samples in the data set was 1437 and is 1257"),
    ):
        with pytest.raises(
            UsageError,
            match=rf"{re.escape(said)}\. Give the old values?, or leave --resume out for a new run \(.*\)\. "
            r"To begin a new run with its weights: leave --resume out, and give load\.path=.*/step-\d+ and another "
            r"--output-dir\.$",
        ):
            again(run, words, accept=["train", "dataset", "optimizer"])


def test_a_model_may_get_the_tables_by_which_layouts_split_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way from one process to `tensor` was refused as another model."""
    cuts = {"cuts": {"0": "colwise", "2": "rowwise"}}
    said = ("model.cuts.0 was not there and is colwise", "model.cuts.2 was not there and is rowwise")
    script(tmp_path).fit("2 steps")
    assert script(tmp_path, resume=True, **cuts).run.changes == said
    table = {"attention_methods": {"1": "forward"}}
    (change,) = script(tmp_path, resume=True, **table).run.changes
    assert change == 'model.1.attention_methods was not there and is ["forward"]'
    with pytest.raises(UsageError, match=r"model\.annotated_blocks was not there"):  # they number the masks
        script(tmp_path, resume=True, blocks=["0", ["1", "2"]])
    monkeypatch.setattr("paddle_dp.identity.same_run._MAX_LAYER_SETTINGS", 1)
    script(tmp_path / "large").fit("2 steps")
    assert script(tmp_path / "large", resume=True, **cuts).run.changes == said


class Attending(nn.Linear):
    """A layer whose methods are decorated."""

    @paddle.jit.to_static
    def compiled(self, x: paddle.Tensor) -> paddle.Tensor:
        return x

    @classmethod
    def shared(cls, x: paddle.Tensor) -> paddle.Tensor:
        return x


@pytest.mark.parametrize("method", ["compiled", "shared"])
def test_a_decorated_method_is_one_in_the_table_too(tmp_path: Path, method: str) -> None:
    """Under paddle.jit.to_static it was refused as another model."""
    script(tmp_path, model=nn.Sequential(Attending(6, 4))).fit("2 steps")
    model = nn.Sequential(Attending(6, 4))
    (change,) = script(tmp_path, model=model, resume=True, attention_methods={"0": method}).run.changes
    assert change == f'model.0.attention_methods was not there and is ["{method}"]'


def sliced(cuts: int = 1, attention_methods: str = "softmax") -> nn.Layer:
    """A model whose own settings have the names of the tables."""
    return nn.Linear(64, 10)


def test_tables_of_a_recipe_are_told_and_a_models_settings_of_their_names_refused(
    run: Path, tmp_path: Path
) -> None:
    (change,) = again(run, "model.cuts={body.0: colwise}").run.changes
    assert change == "model.cuts.body.0 was not there and is colwise"
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    model = f"model={{use: {__name__}.sliced, cuts: 1, attention_methods: softmax}}"
    again(tmp_path, model, resume=None).fit(f"{FEW} steps")
    for was, now in (("cuts: 1", "cuts: 2"), ("methods: softmax", "methods: linear")):
        with pytest.raises(UsageError, match=r"model\.(cuts|attention_methods) was (1|softmax) and is"):
            again(tmp_path, model.replace(was, now))


def test_layers_that_a_setting_names_are_no_methods(tmp_path: Path) -> None:
    """A setting named `attention_methods` that chose one of a layer's sublayers was taken for a table, and told."""

    def model(choice: str) -> nn.Layer:
        layer = dropping()
        layer.softmax, layer.linear, layer.attention_methods = nn.Softmax(), nn.Identity(), choice
        return layer

    script(tmp_path, model=model("softmax")).fit("2 steps")
    with pytest.raises(UsageError, match=r"model\.attention_methods was softmax and is linear"):
        script(tmp_path, model=model("linear"), resume=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "model.hidden=[9]",
            "tensor body.0.weight was [64, 8] and is [64, 9]; model.hidden was [8] and is [9]. ",
        ),
        (
            "model.hidden=[8, 8]",
            "tensor body.2.weight was not there and is [8, 8]; model.hidden was [8] and is [8, 8]. ",
        ),
        (
            "adapter={use: lora, match: ['body.*'], rank: 2}",
            "tensor body.0.lora_A was not there and is [64, 2]; ",
        ),
    ],
)
def test_a_model_that_the_weights_do_not_fit_cannot_be_accepted(run: Path, words: str, said: str) -> None:
    """`--accept` was offered, and then failed while the checkpoint was loaded."""
    match = rf"{re.escape(said)}.*Give the old values, or leave --resume out .*/step-\d+ and another --output-dir\.$"
    with pytest.raises(UsageError, match=match):
        again(run, words, accept=["model", "adapter"])


def test_of_changes_that_only_some_can_be_accepted_each_is_named(run: Path) -> None:
    words = ("train.batch=25", "train.length=30 steps", "optimizer.clip=0.5")
    said = (
        r"Give the old values, or leave --resume out .*\. train\.batch cannot be accepted; "
        r"the others can: --accept optimizer\.clip,train\.length\. To begin .* docs/checks.md"
    )
    with pytest.raises(UsageError, match=said):
        again(run, *words)


def test_other_groups_are_refused_and_accepted_with_what_they_freeze(run: Path) -> None:
    words = "optimizer.groups=[{match: 'body.*', frozen: true}, {match: 'head.*', lr_scale: 0.5}]"
    with pytest.raises(UsageError, match=r"optimizer\.groups\.0\.frozen was not there and is true"):
        again(run, words)
    trainer = again(run, words, accept=["optimizer"])
    body, head = (
        {n: p.numpy() for n, p in trainer.learner.placed.named_parameters() if n.startswith(w)}
        for w in ("body", "head")
    )
    trainer.fit(f"{FEW + 2} steps")
    now = {n: p.numpy() for n, p in trainer.learner.placed.named_parameters()}
    assert all(np.array_equal(now[n], before) for n, before in body.items())
    assert not any(np.array_equal(now[n], before) for n, before in head.items())


def test_a_schedule_may_change_where_no_update_has_been(tmp_path: Path) -> None:
    """The rates of the updates that were done are the same: a run with the new settings would be where it is."""
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("use: cosine", "use: constant"))
    again(tmp_path, resume=None).fit(f"{FEW} steps")
    longer = again(tmp_path, "train.length=50steps")
    assert list(longer.run.changes) == ["train.length was 20 steps and is 50 steps"]
    steps = "schedule={use: milestones, learning_rate: 2.0e-3, warmup: 2 steps, milestones: [%d steps]}"
    assert list(again(tmp_path, steps % 10).run.changes) == ["schedule was constant and is milestones"]
    with pytest.raises(UsageError, match=r"is milestones \(update 6: rate 0\.002, and now 0\.0002\)"):
        again(tmp_path, steps % 5)
    with pytest.raises(UsageError, match=r"schedule\.warmup was 2 steps and is 4 steps \(update 1: "):
        again(tmp_path, "schedule.warmup=4steps")


class Points(house.Points):
    def __init__(self, replaced: int | None = None, samples: int = 24):
        super().__init__(samples, seed=3, by_index=True)
        if replaced is not None:
            self.inputs[replaced] = 0


def script(folder: Path, **changed: Any) -> Trainer:
    paddle.seed(0)
    model = changed.pop("model", None) or dropping()
    words: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(reduction="none"),
        "optimizer": lambda rate, named: paddle.optimizer.AdamW(rate, parameters=[p for _, p in named]),
        "train": Points(), "batch": 8, "length": "14 steps", "schedule": {"use": "constant", "learning_rate": 0.1},
        "callbacks": ["checkpoint"], "folder": folder / "run",
    }  # fmt: skip
    return Trainer.of(model=model, **{**words, **changed})


def dropping(**first: Any) -> nn.Layer:
    """`first`: attributes of the first weight."""
    attributes = paddle.ParamAttr(**first)
    return nn.Sequential(nn.Linear(6, 8, weight_attr=attributes), nn.Dropout(0.1), nn.Linear(8, 4))


def frozen() -> nn.Layer:
    return dropping(trainable=False)


CHANGES: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)},
     "loss.label_smoothing was 0.0 and is 0.1"),
    (lambda: {"loss": nn.CrossEntropyLoss(weight=paddle.ones([4]), reduction="none")},
     "loss.weight was not there and is float32[4], CRC-32 "),
    (lambda: {"model": nn.Sequential(nn.Linear(6, 8), nn.AlphaDropout(0.1), nn.Linear(8, 4))},
     "model.1 was paddle.nn.layer.common.Dropout and is paddle.nn.layer.common.AlphaDropout"),
    (lambda: {"model": dropping(learning_rate=0.5)}, "optimizer.rate_factors was not there and is 1 (CRC-32 "),
    (lambda: {"model": dropping(need_clip=False)}, "optimizer.not_clipped was not there and is 1 (CRC-32 "),
    (lambda: {"loss": "cross_entropy"}, "loss was paddle.nn.layer.loss.CrossEntropyLoss and is "),
    (lambda: {"model": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4))},
     "model.1.p was 0.1 and is 0.2"),
    (lambda: {"model": frozen()}, "frozen parameters was none and is 1, CRC-32"),
    (lambda: {"train": Points(replaced=17)}, "dataset (samples "),
    (lambda: {"precision": "bfloat16"}, "train.precision.dtype was float32 and is bfloat16"),
    (lambda: {"schedule": {"use": "constant", "learning_rate": 0.01}}, "schedule.learning_rate was 0.1 and is 0.01"),
    (lambda: {"schedule": paddle.optimizer.lr.StepDecay(0.1, 4)}, "schedule was constant and is paddle"),
]  # fmt: skip


def test_a_script_is_compared_by_what_its_objects_say(tmp_path: Path) -> None:
    script(tmp_path).fit(f"{FEW} steps")
    assert script(tmp_path, resume=True, length="30 steps").run.changes == (
        "train.length was 14 steps and is 30 steps",
    )
    (said,) = script(tmp_path, resume=True, schedule=paddle.optimizer.lr.StepDecay(0.1, 100)).run.changes
    assert said.startswith("schedule was constant and is paddle")  # no update so far would have another rate
    for change, said in CHANGES:
        with pytest.raises(UsageError, match="as the same run: .*" + re.escape(said)) as refused:
            script(tmp_path, resume=True, **change())
        assert re.search(r"or accept (it|them): accept=\[", str(refused.value))


def test_groups_and_the_function_that_chooses_what_decays_are_compared(tmp_path: Path) -> None:
    def made(factor: float = 1.0, decay: float = 0.1, **how: Any) -> dict[str, Any]:
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
        first = {"params": model[0].parameters(), "learning_rate": factor, "weight_decay": decay}
        optimizer = paddle.optimizer.AdamW(0.1, parameters=[first, {"params": model[1].parameters()}], **how)
        return {"model": model, "schedule": None, "optimizer": optimizer}

    script(tmp_path, **made(apply_decay_param_fun=lambda name: True)).fit("2 steps")
    again = {"apply_decay_param_fun": lambda name: "b" not in "x"}
    assert script(tmp_path, resume=True, **made(**again)).run.changes == ()
    for how, said in (
        ({"factor": 0.5, **again}, "optimizer.groups.0.learning_rate was 1.0 and is 0.5"),
        ({"decay": 0.2, **again}, "optimizer.groups.0.weight_decay was 0.1 and is 0.2"),
        ({"apply_decay_param_fun": lambda name: ".b_" not in name}, "optimizer.decayed was 4 (CRC-32 "),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            script(tmp_path, resume=True, **made(**how))  # type: ignore[arg-type]


def test_the_far_end_of_a_schedule_of_paddles_may_change_and_its_past_may_not(tmp_path: Path) -> None:
    def made(boundaries: list[int], cosine: int = 9) -> dict[str, Any]:
        within = paddle.optimizer.lr.CosineAnnealingDecay(0.1, cosine)
        warm = paddle.optimizer.lr.LinearWarmup(within, 2, 0.0, 0.1)
        model = nn.Linear(6, 4)
        rates = [0.1, 0.05, 0.01]
        schedule = paddle.optimizer.lr.PiecewiseDecay(boundaries, rates) if boundaries else warm
        optimizer = paddle.optimizer.SGD(schedule, parameters=model.parameters())
        return {"model": model, "schedule": None, "optimizer": optimizer}

    script(tmp_path / "a", **made([2, 50])).fit("4 steps")
    (said,) = script(tmp_path / "a", resume=True, **made([2, 90])).run.changes
    assert said == "schedule of the optimizer.boundaries was [2, 50] and is [2, 90]"
    with pytest.raises(UsageError, match=r"and is \[3, 50\] \(update 3: rate 0\.05, and now 0\.1\)"):
        script(tmp_path / "a", resume=True, **made([3, 50]))
    script(tmp_path / "b", **made([])).fit("4 steps")
    with pytest.raises(UsageError, match=r"learning_rate\.T_max was 9 and is 90 \(update "):
        script(tmp_path / "b", resume=True, **made([], cosine=90))


def test_a_schedule_of_another_kind_goes_on_at_the_same_update(tmp_path: Path) -> None:
    """Its state has other keys, or there was none."""
    lr = paddle.optimizer.lr

    class Own(lr.LRScheduler):  # type: ignore[name-defined]
        def __init__(self) -> None:
            self.seen = 3
            super().__init__(0.1)

        def state_keys(self) -> None:
            self.keys = ["last_epoch", "last_lr", "seen"]

        def get_lr(self) -> float:
            return 0.1 / self.seen

    def warm() -> Any:
        return lr.LinearWarmup(lr.CosineAnnealingDecay(0.1, 20), 2, 0.0, 0.1)

    due = warm()
    due.step(4)
    for name, schedule in (("constant", {"use": "constant", "learning_rate": 0.1}), ("own", Own())):
        script(tmp_path / name, schedule=schedule).fit("4 steps")
        trainer = script(tmp_path / name, schedule=warm(), resume=True, accept=["schedule"])
        assert rate_of(trainer) == due()

    def finished(rate: Any) -> dict[str, Any]:
        model = dropping()
        optimizer = paddle.optimizer.AdamW(rate, parameters=model.parameters())
        return {"model": model, "schedule": None, "optimizer": optimizer}

    script(tmp_path / "none", **finished(0.1)).fit("4 steps")
    trainer = script(tmp_path / "none", **finished(warm()), resume=True, accept=["schedule", "optimizer"])
    assert rate_of(trainer) == due()
    trainer = script(tmp_path / "constant", schedule=Own(), resume=True, accept=["schedule"])
    assert trainer.learner.rate.schedule.state_dict() == {"last_epoch": 4, "last_lr": 0.1, "seen": 3}


class Warm(LR.LRScheduler):  # type: ignore[name-defined, misc]
    """A schedule of the user's own, whose state is the number of steps and their rate."""

    def get_lr(self) -> float:
        return self.base_lr * min(1.0, (self.last_epoch + 1) / 6)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:There are some unused values")  # Paddle's, of a schedule within one
@pytest.mark.parametrize(
    "make",
    [
        lambda peak: LR.LinearLR(peak, 7),
        lambda peak: LR.MultiplicativeDecay(peak, lambda epoch: 0.9),
        lambda peak: LR.LinearWarmup(LR.LinearLR(peak, 7), 2, 0.0, peak),
        Warm,
    ],
)
def test_an_accepted_schedule_without_a_formula_takes_its_steps_again(
    tmp_path: Path, make: Callable[[float], Any]
) -> None:
    """LinearLR kept the old peak for good, others for one update, where the message promised the new one."""
    script(tmp_path, schedule=make(0.1)).fit("4 steps")
    with pytest.raises(UsageError, match=r"schedule\.\S+ was 0\.1 and is 0\.2"):
        script(tmp_path, schedule=make(0.2), resume=True)
    trainer, due = script(tmp_path, schedule=make(0.2), resume=True, accept=["schedule"]), make(0.2)
    for _ in range(4):
        due.step()
    assert rate_of(trainer) == due()
    trainer.fit("6 steps")
    assert trainer.run.resumed is not None
    trainer.restore(trainer.run.resumed)  # as the guard does
    assert rate_of(trainer) == due()
    trainer.fit("7 steps")
    for _ in range(3):
        due.step()
    assert rate_of(trainer) == due()
    assert rate_of(script(tmp_path, schedule=make(0.2), resume=True)) == due()


class Spread(LR.LRScheduler):  # type: ignore[name-defined, misc]
    """A schedule of the user's own over all steps."""

    def __init__(self, steps: int, peak: float) -> None:
        self.total = steps
        super().__init__(peak)

    def get_lr(self) -> float:
        return self.base_lr * (1 - self.last_epoch / self.total)  # type: ignore[no-any-return]


def test_another_length_of_a_schedule_of_ones_own_that_takes_it_is_refused(tmp_path: Path) -> None:
    """The rates were neither those of the old length nor those of the new one."""
    for name, schedule in (("spread", "Spread"), ("any", "Warm")):
        settings = f"use: {__name__}.{schedule}, {'peak' if name == 'spread' else 'learning_rate'}: 0.1"
        recipe = RECIPE.replace("use: cosine, learning_rate: 2.0e-3, warmup: 2 steps", settings)
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.yaml").write_text(recipe)
        again(tmp_path / name, resume=None).fit(f"{FEW} steps")
    (change,) = again(tmp_path / "any", "train.length=30steps").run.changes
    assert change == "train.length was 20 steps and is 30 steps"
    with pytest.raises(
        UsageError, match=r"train\.length was 20 steps and is 30 steps\. .*--accept train\.length"
    ):
        again(tmp_path / "spread", "train.length=30steps")
    assert again(tmp_path / "spread").run.changes == ()
    # 1437 samples are 29 batches of 50
    again(
        tmp_path / "spread", "train.length=29steps", "output_dir=" + str(tmp_path / "epoch"), resume=None
    ).fit("2 steps")
    epoch = again(tmp_path / "spread", "train.length=1epochs", "output_dir=" + str(tmp_path / "epoch"))
    assert epoch.run.changes == ("train.length was 29 steps and is 1 epoch",)
    assert rate_of(epoch) == pytest.approx(0.1 * (1 - 2 / 29), rel=1e-12)
    trainer = again(tmp_path / "spread", "train.length=30steps", accept=["train.length"])
    assert rate_of(trainer) == pytest.approx(0.1 * (1 - FEW / 30), rel=1e-12)


def test_another_script_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, file = sys.modules["__main__"], tmp_path / "script.py"
    monkeypatch.setattr(main, "__file__", str(file), raising=False)
    file.write_text("1")
    script(tmp_path).fit("2 steps")
    file.write_text("2")
    (said,) = script(tmp_path, resume=True).run.changes
    assert said.startswith("code of the script was CRC-32 ")


@pytest.mark.parametrize("replaced", [0, 17])  # compared alone, and in a group
def test_one_replaced_sample_of_a_small_data_set_is_noticed_and_can_be_accepted(
    tmp_path: Path, replaced: int
) -> None:
    script(tmp_path).fit("2 steps")
    with pytest.raises(
        UsageError, match=r"dataset \(samples? .* of the training data\) was .* accept=\['dataset'\]"
    ):
        script(tmp_path, resume=True, train=Points(replaced))
    trainer = script(tmp_path, resume=True, train=Points(replaced), accept=["dataset"])
    trainer.fit("4 steps")
    kept = checkpoints.load(checkpoints.newest(tmp_path / "run" / "checkpoints")).state["identity"]  # type: ignore[arg-type]
    assert [(row["step"], row["key"].split(" ")[0]) for row in kept["accepted"]] == [(2, "dataset")]
    after = script(tmp_path, resume=True, train=Points(replaced), accept=["dataset"])
    assert after.run.changes == () and after.run.identity is not None
    assert len(after.run.identity.accepted) == 1


def on_two_ranks(folder: str) -> list[Any]:
    """What this rank is told when it resumes with another loss, and how far it gets when that is accepted."""
    other: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
        "resume": True,
    }
    script(Path(folder)).fit("2 steps")
    try:
        script(Path(folder), **other)
    except UsageError as error:
        trainer = script(Path(folder), **other, accept="loss")
        return [str(error), trainer.run.changes, trainer.fit("4 steps").step]
    return []


def test_all_ranks_are_told_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, str(tmp_path))
    assert first == second and first[2] == 4
    assert (
        "loss.label_smoothing was 0.0 and is 0.1" in first[0]
        and first[1] == first[0].split(": ")[1].split(". ")[:1]
    )


def test_held_out_data_may_change_and_it_is_said(tmp_path: Path) -> None:
    script(tmp_path, test=Points()).fit("2 steps")
    (said,) = script(tmp_path, test=Points(replaced=3), resume=True).run.changes
    assert said.startswith("dataset (samples ") and "of the held-out data) was" in said
    (said,) = script(tmp_path, test=Points(samples=20), resume=True).run.changes
    assert said == "samples in the held-out data was 24 and is 20"


def test_batch_norm_makes_its_synchronisation_matter(tmp_path: Path) -> None:
    def model() -> nn.Layer:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1D(8), nn.Linear(8, 4))

    script(tmp_path, model=model()).fit("2 steps")
    strategy = {"use": "data_parallel", "sync_batch_norm": False}
    with pytest.raises(UsageError, match=r"strategy\.sync_batch_norm was true and is false"):
        script(tmp_path, model=model(), resume=True, strategy=strategy)


def test_a_code_change_of_the_schedule_is_noticed_by_its_rates(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Config, "left", lambda self, done: 1 - done)
    with pytest.raises(UsageError, match=r"schedule was another function and is this one \(update "):
        again(run)


def test_the_page_has_the_whole_table() -> None:
    page = Path("docs/checks.md").read_text()
    for key in RULES:
        assert f"`{key}" in page, f"docs/checks.md does not say what becomes of {key}"


class Freezes(Callback):
    """A callback of the user's own."""

    def __init__(self, after: int):
        self.after = after


class Scales(nn.Layer):
    """Multiplies by numbers that no checkpoint holds."""

    def __init__(self, scale: float = 1.0):
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4), paddle.full([4], scale)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.linear(x) * self.scale


class Own(paddle.optimizer.SGD):
    """An optimizer of the user's own, with settings of its own."""

    def __init__(self, parameters: Any, betas: list[float], diffusion: float = 0.1):
        super().__init__(0.1, parameters=parameters)
        self.betas, self.diffusion = betas, diffusion


def in_evaluation(model: nn.Layer) -> nn.Layer:
    model[1].eval()  # type: ignore[index]
    return model


def spectral(iterations: int = 1) -> dict[str, Any]:
    return {"model": nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 4), n_power_iterations=iterations))}


def momentum(**how: Any) -> dict[str, Any]:
    """With a finished optimizer."""
    model = nn.Linear(6, 4)
    settings = {
        "learning_rate": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "parameters": model.parameters(),
        **how,
    }
    return {"model": model, "schedule": None, "optimizer": paddle.optimizer.Momentum(**settings)}


def hooked(scale: float = 1.0) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 4))
    model[0].register_forward_post_hook(lambda layer, inputs, output: output * scale)
    return {"model": model}


def with_own(**how: Any) -> dict[str, Any]:
    model = nn.Linear(6, 4)
    own = Own(model.parameters(), **{"betas": [0.9, 0.99], **how})
    return {"model": model, "schedule": None, "optimizer": own}


@pytest.mark.parametrize(
    ("of", "changes"),
    [
        (lambda scale=1.0: {"model": Scales(scale)}, [({"scale": 2.0}, "model.scale was float32[4], CRC-32 ")]),
        (lambda within=dropping: {"model": within()}, [
            ({"within": lambda: in_evaluation(dropping())}, "layers in evaluation mode was not there and is 1 (CRC-"),
        ]),
        (with_own, [
            ({"betas": [0.9, 0.9]}, "optimizer.betas was [0.9, 0.99] and is [0.9, 0.9]"),
            ({"diffusion": 0.2}, "optimizer.diffusion was 0.1 and is 0.2"),
        ]),
        (spectral, [({"iterations": 2}, "model.0.hook before 0.n_power_iterations was 1 and is 2")]),
        (hooked, [({"scale": 2.0}, "model.0.hook behind 0.scale was 1.0 and is 2.0")]),
        (momentum, [
            ({"momentum": 0.8}, "optimizer.momentum was 0.9 and is 0.8"),
            ({"weight_decay": 0.2}, "optimizer.regularization_coeff was 0.1 and is 0.2"),
            ({"learning_rate": 0.2}, "optimizer.learning_rate was 0.1 and is 0.2"),
            ({"grad_clip": nn.ClipGradByGlobalNorm(1.0)}, "grad_clip was not there and is paddle"),
        ]),
    ],
    ids=["attribute", "evaluation mode", "own optimizer", "spectral norm", "hook", "momentum"],
)  # fmt: skip
def test_what_stands_elsewhere_than_in_settings_is_compared(
    tmp_path: Path, of: Callable[..., dict[str, Any]], changes: list[tuple[dict[str, Any], str]]
) -> None:
    script(tmp_path, **of()).fit("2 steps")
    assert script(tmp_path, resume=True, **of()).run.changes == ()
    for how, said in changes:
        with pytest.raises(UsageError, match=re.escape(said)):
            script(tmp_path, resume=True, **of(**how))


def test_own_callbacks_and_modules_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_net.py").write_text("SCALE = 1")
    importlib.import_module("own_net")
    script(tmp_path, callbacks=["checkpoint", Freezes(3)]).fit("2 steps")
    same = script(tmp_path, callbacks=["checkpoint", Freezes(3)], resume=True)
    assert same.run.changes == ()
    (tmp_path / "own_net.py").write_text("SCALE = 10")
    code, after = script(tmp_path, callbacks=["checkpoint", Freezes(4)], resume=True).run.changes
    assert code.startswith("code of module own_net was CRC-32 ")
    assert after == "callback tests.identity.test_same_run.Freezes.after was 3 and is 4"
    name = "tests.identity.test_same_run.Freezes"
    assert f"callback {name} was {name} and is not there" in script(tmp_path, resume=True).run.changes
    del sys.modules["own_net"]


def test_the_code_of_a_notebook_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.delattr(main, "__file__", raising=False)
    codes = []
    for sign in ("", "", "-"):
        cell = f"def loss(o, t):\n    return {sign}o"
        file = f"<cell {len(codes)}>"  # a notebook keeps the text of its cells there
        monkeypatch.setitem(linecache.cache, file, (len(cell), None, cell.splitlines(keepends=True), file))
        exec(compile(cell, file, "exec"), vars(main))
        codes.append(script_code())
    del main.loss  # type: ignore[attr-defined]
    assert codes[0] == codes[1] != codes[2] != None  # noqa: E711


def test_other_arguments_of_a_script_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They decide global variables, which nobody reads."""
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", __file__, raising=False
    )  # a process of xdist has none
    script(tmp_path).fit("2 steps")
    monkeypatch.setattr(sys, "argv", ["train.py", "--alpha", "0.5"])
    (said,) = script(tmp_path, resume=True).run.changes
    assert said.startswith("arguments of the script was ") and said.endswith(" and is --alpha 0.5")


def test_many_changes_are_named_in_a_few_words(tmp_path: Path) -> None:
    def deep(p: float) -> nn.Layer:
        return nn.Sequential(nn.Linear(6, 4), *[nn.Dropout(p) for _ in range(20)])

    script(tmp_path, model=deep(0.1)).fit("2 steps")
    with pytest.raises(
        UsageError, match=r"model\.8\.p was 0\.1 and is 0\.2; and 12 more\. .* accept=\['model'\]"
    ):
        script(tmp_path, model=deep(0.2), resume=True)
    assert len(script(tmp_path, model=deep(0.2), resume=True, accept="model").run.changes) == 20


def test_own_callbacks_of_a_recipe_are_told(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    own = "callbacks=[{use: checkpoint}, {use: tests.identity.test_same_run.freezes, after: %d}]"
    again(tmp_path, own % 3, resume=None).fit("2 steps")
    assert again(tmp_path, own % 3).run.changes == ()
    assert list(again(tmp_path, own % 4).run.changes) == [
        "callback tests.identity.test_same_run.freezes.after was 3 and is 4"
    ]


def freezes(run: Any, after: int) -> Freezes:
    return Freezes(after)


def test_a_resume_may_unfreeze_on_purpose(tmp_path: Path) -> None:
    script(tmp_path, model=frozen()).fit("2 steps")
    model = dropping()
    trainer = script(tmp_path, model=model, resume=True, accept=["frozen"])
    before = model[0].weight.numpy()  # type: ignore[index]
    assert trainer.fit("4 steps").step == 4
    assert (model[0].weight.numpy() != before).all()  # type: ignore[index]
