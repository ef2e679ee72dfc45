"""Nothing that is not finite, or not the same on all ranks, is trained on, saved, exported or resumed in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp import checkpoint as checkpoints
from paddle_dp.assembly import entry_points
from paddle_dp.assembly.build import build
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.checkpoint import Checks, Snapshot, TensorShard
from paddle_dp.checkpoint.manifest import read_manifest
from paddle_dp.errors import CheckpointError, DivergenceError, ExportError, NotFiniteError, UsageError
from paddle_dp.export import export as exporting
from paddle_dp.export import hugging_face, program
from paddle_dp.mesh import Mesh, join
from paddle_dp.mesh.environment import Environment
from paddle_dp.recipe import read_recipe
from paddle_dp.train import Callback
from paddle_dp.train.state import optimizer_states
from tests.assembly.test_script import Two
from tests.house import datasets as house
from tests.house.recipes import small_recipe
from tests.house.runs import events
from tests.house.training import untried
from tests.ranks import run_ranks

NAN, INF = float("nan"), float("inf")


class Points(house.Points):
    """40 samples; those of `bad` hold a NaN."""

    def __init__(self, bad: tuple[int, ...] = ()):
        super().__init__(40)
        self.inputs[list(bad), 2] = NAN

    def name_of(self, i: int) -> str:
        return f"/points/{i}.npy"


class At(Callback):
    """Does something right after an update: before the console reads, and before anything is saved."""

    reads = True

    def __init__(self, step: int, do: Callable[[Trainer], None]):
        self.at, self.do = step, do

    def step(self, moment: Any) -> None:
        if moment.progress.step == self.at:
            self.do(moment.trainer)

    def due_at_step(self, step: int) -> bool:
        return step == self.at


def model() -> nn.Layer:
    """On a CPU, Paddle's ReLU makes 0 of a NaN: behind it nothing can be seen."""
    paddle.seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def made(folder: Path, *callbacks: Any, **how: Any) -> Trainer:
    words: dict[str, Any] = {
        "model": model(), "loss": "cross_entropy", "optimizer": {"use": "adamw", "clip": 1.0},
        "schedule": {"use": "constant", "learning_rate": 3e-3},
        "train": Points(), "test": Points(), "batch": 8, "length": "12 steps", "strategy": "single", "folder": folder,
    }  # fmt: skip
    kept = [{"use": "checkpoint", "every": "2 steps", "keep": 2, "best": "acc1"}]
    return Trainer.of(**{**words, "callbacks": [*kept, *callbacks], **how})


def put(tensor: paddle.Tensor, value: float) -> None:
    """One number of a tensor."""
    array = tensor.numpy().copy()
    array.reshape(-1)[1] = value
    tensor.set_value(array)


def poison(what: str, value: float = NAN) -> Callable[[Trainer], None]:
    def do(trainer: Trainer) -> None:
        optimizer: Any = trainer.learner.optimizer
        state = dict(optimizer.state_dict())
        named = dict(trainer.learner.model.named_parameters()) | dict(trainer.learner.model.named_buffers())
        put(named[what] if what in named else next(t for n, t in state.items() if what in n), value)

    return do


def steps(folder: Path) -> list[int]:
    return [checkpoints.step_of(path) for path in checkpoints.checkpoints(folder / "checkpoints")]


def test_a_sample_that_is_none_is_named_though_the_loss_looks_well(tmp_path: Path) -> None:
    """The loss and all later gradients are finite: the weights alone show it, and the data say why."""
    callbacks: list[Any] = [{"use": "metrics", "every": "1 step"}]
    trainer = made(tmp_path / "run", train=Points(bad=(37,)), optimizer="adamw", callbacks=callbacks, seed=1)
    with pytest.raises(NotFiniteError) as caught:
        trainer.fit()
    said = str(caught.value)
    step = next(s for s in range(1, 6) if 37 in trainer.loader.sampler.global_batch(0, s - 1))
    sample = f"Sample 37 (/points/37.npy) of the training data, read in step {step}, has inputs that are not"
    told = [
        said.index(text) for text in (": training cannot go on", sample, "A lower schedule.learning_rate")
    ]
    assert said.startswith(f"the gradient norm is nan at step {step}: that of '0.weight' has")
    assert told == sorted(told), "the sample is the cause, and comes before advice"
    assert f"The loss was finite at step {step - 1}, when it was last read." in said or step == 1
    assert "There is no checkpoint" in said


def lose_on_one_rank(folder: str) -> str:
    """What ends a training in which rank 1's loss is no number from its fourth forward on."""
    untried()
    calls = []

    def loss(outputs: paddle.Tensor, targets: paddle.Tensor) -> paddle.Tensor:
        calls.append(1)
        found = nn.functional.cross_entropy(outputs, targets, reduction="none").reshape([-1])
        return found * (NAN if Environment.read().rank == 1 and len(calls) > 3 else 1.0)

    metrics = [{"use": "metrics", "every": "1 step"}]
    try:
        made(Path(folder), loss=loss, callbacks=metrics, strategy="data_parallel", length="40 steps").fit()
    except NotFiniteError as error:
        return str(error)
    return ""


def test_a_loss_that_is_none_names_its_ranks(tmp_path: Path) -> None:
    said, other = run_ranks(lose_on_one_rank, 2, str(tmp_path / "run"))
    assert said == other
    assert re.match(r"the loss is nan at step \d+ on rank 1: training cannot go on from here\.", said), said
    assert "guard: {non_finite: stop} looks before each update, and names the layer." in said


def test_the_same_is_seen_in_the_weights_where_nobody_reads_the_gradients(tmp_path: Path) -> None:
    trainer = made(tmp_path / "run", train=Points(bad=(37,)), optimizer="adamw", callbacks=[])
    assert trainer.check_every is not None  # on one process, too
    trainer.check_every = replace(trainer.check_every, count=4)
    with pytest.raises(
        NotFiniteError, match=r"after step \d+: '0.weight' is not finite: \d+ NaN of 96"
    ) as caught:
        trainer.fit()
    assert re.search(
        r"mend it, or leave it out\. All was good after step [04], when it was last looked at",
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("what", "value", "named"),
    [
        ("2.bias", NAN, "'2.bias' is not finite: 1 NaN of 4"),
        pytest.param("0.weight", INF, "'0.weight' is not finite: 1 inf of 96", marks=pytest.mark.long),
        ("moment2", NAN, "moment2' is not finite: 1 NaN of"),
    ],
)
def test_it_is_not_saved_over_what_is_good(tmp_path: Path, what: str, value: float, named: str) -> None:
    trainer = made(tmp_path / "run", At(6, poison(what, value)))
    with pytest.raises(NotFiniteError) as caught:
        trainer.fit()
    good = tmp_path / "run" / "checkpoints" / "step-00000004"
    assert "before the checkpoint of step 6, which was not written: " in str(caught.value)
    assert named in str(caught.value) and "All was good after step 4" in str(caught.value)
    assert f"The newest checkpoint that was found good is {good}: resume=True continues from it." in str(
        caught.value
    )
    assert steps(tmp_path / "run") == [2, 4]
    assert read_manifest(good).checks == Checks(agreed=True, finite=True, step=4)
    again = made(tmp_path / "run", resume=True)
    assert again.fit().step == 12


class Masked(nn.Layer):
    """A mask of minus infinities, as attention has them, and a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 4), nn.BatchNorm1D(4)
        self.register_buffer("mask", paddle.full([4], -INF))
        self.register_buffer("seen", paddle.zeros([4]))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.norm(self.first(x)) + paddle.where(paddle.isinf(self.mask), paddle.zeros([4]), self.mask)


@pytest.mark.parametrize("buffer", ["norm._variance", "seen"])
def test_buffers_are_looked_at_and_masks_may_be_infinite(tmp_path: Path, buffer: str) -> None:
    assert made(tmp_path / "well", model=Masked()).fit().step == 12
    with pytest.raises(NotFiniteError, match=f"'{buffer}' is not finite: 1 inf of 4"):
        made(tmp_path / "ill", At(6, poison(buffer, INF)), model=Masked()).fit()
    assert steps(tmp_path / "ill") == [2, 4]


def test_a_training_does_not_begin_with_what_is_not_finite(tmp_path: Path) -> None:
    broken = model()
    put(broken[0].weight, NAN)
    with pytest.raises(NotFiniteError, match=r"before the first update: '0.weight' is not finite"):
        made(tmp_path / "run", model=broken).fit()


def test_an_evaluation_that_is_no_number_ends_the_run_and_is_never_the_best(tmp_path: Path) -> None:
    """The weights that it was found on are good, and are saved first where that is due."""
    saves = {"use": "checkpoint", "every": "4 steps", "best": "acc1"}
    callbacks: list[Any] = [saves, {"use": "evaluate", "every": "4 steps"}, "metrics"]
    with pytest.raises(NotFiniteError) as caught:
        made(tmp_path / "run", test=Points(bad=(11,)), callbacks=callbacks, model=nn.Linear(6, 4)).fit()
    said = str(caught.value)
    assert "the evaluation after step 4 gives loss nan, though all weights are finite. Sample 11 " in said
    assert "of the held-out data, read by the evaluation, has inputs that are not finite" in said
    assert checkpoints.best(tmp_path / "run" / "checkpoints") is None and steps(tmp_path / "run") == [4]
    assert "step-00000004: resume=True continues from it" in said
    rows = events(tmp_path / "run")
    assert [row["event"] for row in rows[-3:]] == ["evaluated", "saved", "failed"] and rows[-3][
        "loss"
    ] is None

    def standard(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    left = json.loads((tmp_path / "run" / "evaluation.json").read_text(), parse_constant=standard)
    assert left["not_finite"] == {"loss": "nan"}


def test_a_training_may_go_on_after_an_evaluation_that_was_no_number(tmp_path: Path) -> None:
    """The first evaluation that was no number ended every later `fit`, at its first callback."""
    trainer = made(tmp_path / "run", test=Points(bad=(11,)), model=nn.Linear(6, 4))
    with pytest.raises(NotFiniteError, match="the evaluation after step 0 gives loss nan"):
        trainer.evaluate()
    trainer.fit("2 steps")
    trainer.add(At(3, lambda trainer: trainer.evaluate()))
    with pytest.raises(NotFiniteError, match="the evaluation after step 3 gives loss nan"):
        trainer.fit("4 steps")
    assert trainer.fit("4 steps").step == 4


def of_finite_scores(outputs: Any, targets: Any) -> float:
    """A metric as those of scikit-learn, which refuse a NaN."""
    if not np.isfinite(outputs).all():
        raise ValueError("Input contains NaN")
    return 0.5


def never(outputs: Any, targets: Any) -> float:
    raise ValueError("of no use")


def test_a_metric_that_refuses_a_bad_sample_is_not_blamed_for_it(tmp_path: Path) -> None:
    def message(kind: type[Exception], **how: Any) -> str:
        with pytest.raises(kind) as caught:
            made(
                tmp_path / "run", callbacks=["evaluate"], length="2 steps", model=nn.Linear(6, 4), **how
            ).fit()
        return str(caught.value)

    text = message(NotFiniteError, test=Points(bad=(11,)), metrics=[of_finite_scores])
    sample = text.index("Sample 11 (/points/11.npy) of the held-out data, read by the evaluation, has inputs")
    assert sample < text.index("Input contains NaN") and "gives loss nan" in text
    assert "of no use" in message(UsageError, metrics=[never])  # its own fault: the loss is finite


def spoiled(checkpoint: Path, checks: Checks | None, name: str = "model/0.weight") -> None:
    """Writes a checkpoint anew with a NaN in it, saying `checks` of itself (None: as an older version did)."""
    saved = checkpoints.load(checkpoint)
    tensors = {n: TensorShard.full(n, saved.read(n)) for n in saved.names}
    if checks is None:
        tensors[name].array.reshape(-1)[0] = NAN
    own = saved.rank_state(0) or {}
    checkpoints.save(
        Snapshot(tensors=tensors, state=saved.state, rank_state=own, checks=checks),
        checkpoint.parent,
        Mesh.alone(),
    )


def test_resume_steps_over_what_is_not_good_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(
        tmp_path / "run", length="8 steps", callbacks=[{"use": "checkpoint", "every": "2 steps", "keep": 4}]
    ).fit()
    folder = tmp_path / "run" / "checkpoints"
    spoiled(folder / "step-00000008", None)
    spoiled(folder / "step-00000006", Checks(agreed=False, finite=True, step=6))
    spoiled(folder / "step-00000004", Checks(agreed=True, finite=False, step=4))
    assert checkpoints.newest_good(folder) == folder / "step-00000002"
    with pytest.raises(CheckpointError, match="the ranks' weights differed"):
        checkpoints.load(folder / "step-00000006")
    assert checkpoints.prune(folder, keep=1) == [folder / "step-00000004", folder / "step-00000006"]
    trainer = made(tmp_path / "run", resume=True)
    assert trainer.progress.step == 2
    said = capsys.readouterr().err
    assert f"Skipped the checkpoint {folder / 'step-00000008'}: 'model/0.weight' in it holds NaN." in said


def test_a_checkpoint_from_before_loads(tmp_path: Path) -> None:
    """Its manifest says nothing: its numbers are looked at, and are well."""
    made(tmp_path / "run", length="2 steps").fit()
    path = tmp_path / "run" / "checkpoints" / "step-00000002" / "manifest.json"
    content = json.loads(path.read_text())
    assert content.pop("checks") == {"agreed": True, "finite": True, "step": 2}
    from paddle_dp.checkpoint import json_codec, manifest

    del content["crc32"]
    path.write_bytes(json_codec.encode({**content, "crc32": manifest._crc(content)}))
    assert read_manifest(path.parent).checks is None
    assert made(tmp_path / "run", resume=True).fit().step == 12


DIGITS = small_recipe(
    "length: 2 steps, batch: 50", model="mlp, inputs: 64, classes: 10", strategy="single",
    callbacks="[{use: checkpoint}]",
)  # fmt: skip


def test_what_is_not_finite_is_not_evaluated_exported_or_merged(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(DIGITS)
    recipe = read_recipe(tmp_path / "recipe.yaml", [f"output_dir={tmp_path}"])
    build(recipe, Mesh.alone()).fit("2 steps")
    saved = tmp_path / "checkpoints" / "step-00000002"
    name = "model/head.bias"
    spoiled(saved, None, name)
    metric = f"{of_finite_scores.__module__}.{of_finite_scores.__name__}"
    measured = read_recipe(
        tmp_path / "recipe.yaml", [f"output_dir={tmp_path}", f"metrics=[{{use: {metric}}}]"]
    )
    for each in (recipe, measured):
        with pytest.raises(NotFiniteError, match=f"the evaluation of {saved} gives loss nan") as caught:
            entry_points.evaluate(each, {"checkpoint": str(saved)})
        assert ("Input contains NaN" in str(caught.value)) == (each is measured)
    with pytest.raises(ExportError, match=f"'{name.removeprefix('model/')}' is not finite: 1 NaN of"):
        exporting.export(recipe, {"to": str(tmp_path / "out"), "checkpoint": str(saved)})
    assert not (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match=f"'{name}' in .* holds NaN"):
        checkpoints.merge(saved, tmp_path / "merged.safetensors")
    same = [[np.array([[1.0], [NAN]], "float32")]]
    with pytest.raises(ExportError, match="sample 1 is the first"):
        program.check_finite(same)


def test_an_adapter_that_is_not_finite_is_not_merged(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"{DIGITS}adapter: {{use: lora, rank: 2, match: [head]}}\n")
    recipe = read_recipe(tmp_path / "recipe.yaml", [f"output_dir={tmp_path}"])
    build(recipe, Mesh.alone()).fit("2 steps")
    spoiled(saved := tmp_path / "checkpoints" / "step-00000002", None, "model/head.lora_B")
    for write, name in ((entry_points.merge, "merged.safetensors"), (hugging_face.export, "hf")):
        with pytest.raises(CheckpointError, match=r"'model/head\.lora_B' in .* holds NaN"):
            write(recipe, {"to": str(tmp_path / name), "checkpoint": str(saved)})
        assert not (tmp_path / name).exists()


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {"use": "data_parallel"},
    "sharding 3": {"use": "hybrid", "sharding": 2, "sharding_stage": 3},
    "tensor": {"use": "hybrid", "tensor": 2},
    "pipeline": {"use": "hybrid", "pipeline": 2},
}
# Which layout, what is spoiled on which ranks with what, and what must be said. Names are whole-model names.
FAULTS: list[tuple[str, str, list[int], float, str]] = [
    ("data", "up.weight", [1], 0.5, "rank 1 holds other values than rank 0 in 'blocks.0.up.weight'"),
    ("data", "up.weight", [1], INF, "'blocks.0.up.weight' is not finite on rank 1: 1 inf of 96"),
    ("data", "up.weight", [0, 1], NAN, "'blocks.0.up.weight' is not finite on ranks 0, 1: 1 NaN of 96"),
    ("data", "moment1", [1], 0.5, "rank 1 holds other values than rank 0 in 'optimizer/blocks.0.up.weight/moment1'"),
    ("sharding 3", "state", [1], NAN, "is not finite on rank 1: 1 NaN of"),
    ("sharding 3", "up.weight", [0, 1], NAN, "'blocks.0.up.weight' is not finite on rank "),
    ("tensor", "up.weight", [1], NAN, "'blocks.0.up.weight' is not finite on rank 1: 1 NaN of 48"),
    ("tensor", "down.bias", [1], 0.5, "rank 1 holds other values than rank 0 in 'blocks.0.down.bias'"),
    ("pipeline", "up.weight", [1], INF, "'blocks.1.up.weight' is not finite on rank 1: 1 inf of 96"),
    ("pipeline", "", [], 0.0, ""),
]  # fmt: skip


def _spoil(trainer: Trainer, what: str, value: float) -> None:
    """Of this rank's tensors that are there, the first of this name."""
    if what in ("moment1", "state"):
        states = optimizer_states(trainer.learner)
        put(next(t for name, t, _ in states if name.endswith("moment1")), value)
        return
    held = {n: p for n, p in trainer.learner.placed.named_parameters() if trainer.learner.placed.is_stored(p)}
    mine = [p for n, p in held.items() if n.endswith(what)]
    if mine:
        put(mine[0], value)


SOME = [n for n in range(len(FAULTS)) if n != 1]  # the other has the way of two of these


def spoil(folder: str, faults: list[int]) -> list[Any]:
    """What was said of each fault, and which checkpoints there are then."""
    untried()
    mesh, told = join(), []
    for number in faults:
        layout, what, ranks, value, _ = FAULTS[number]
        paddle.seed(3)
        run = Path(folder) / str(number)
        acts = At(
            6, lambda trainer, w=what, v=value, r=ranks: _spoil(trainer, w, v) if mesh.rank in r else None
        )
        trainer = made(run, acts, model=Two(), strategy=LAYOUTS[layout])
        try:
            trainer.fit()
            said = ""
        except (DivergenceError, NotFiniteError) as error:
            said = str(error)
        mesh.wait("told")
        told.append([said, steps(run)])
    return told


@pytest.mark.parametrize("faults", [SOME, pytest.param([1], marks=pytest.mark.long)], ids=["some", "others"])
def test_in_every_layout_what_went_wrong_on_some_rank_is_named_and_not_saved(
    tmp_path: Path, faults: list[int]
) -> None:
    for found in run_ranks(spoil, 2, str(tmp_path), faults, timeout=200):
        for number, (said, saved) in zip(faults, found, strict=True):
            layout, what, _, _, wanted = FAULTS[number]
            assert wanted in said, (layout, what, said)
            if not wanted:  # nothing was spoiled
                assert (said, saved) == ("", [10, 12])
                continue
            assert "before the checkpoint of step 6, which was not written" in said, (layout, what, said)
            assert "step-00000004" in said and saved == [2, 4]
