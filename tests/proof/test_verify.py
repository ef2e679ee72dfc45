"""`paddle-dp verify` as a person runs it, and faults of real ranks that it must name."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.checkpoint import load
from paddle_dp.errors import UsageError
from paddle_dp.launch.command import Job
from paddle_dp.proof import SideRunner, compare_sides, sides
from paddle_dp.proof.trace_files import key_of
from paddle_dp.proof.verify import _checkpoint
from paddle_dp.proof.verify import verify as verify_here
from tests.house.command_service import command_line
from tests.house.forked_commands import run_command
from tests.house.recipes import small_recipe
from tests.jobs import comparisons_in_forks, run_in_forks, verdict_in_forks
from tests.proof.several import run_sides

FAULTS = "tests.proof.faults:"


def recipe(folder: Path, norm: str = "batch", optimizer: str = "momentum", peak: float = 0.05) -> Path:
    found = folder / "case.yaml"
    found.write_text(small_recipe(
        "length: 1 epoch, batch: 10", model=f"convnet, classes: 10, widths: [8, 16], norm: {norm}",
        dataset="digits, as_image: true", optimizer=optimizer, schedule=f"constant, learning_rate: {peak}",
        strategy="data_parallel, sync_batch_norm: true",
    ))  # fmt: skip
    return found


def verify(*words: str) -> subprocess.CompletedProcess[str]:
    command = [*command_line(), "verify", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)


@pytest.mark.long
@pytest.mark.processes
def test_three_ranks_are_one_process_and_a_person_reads_why(tmp_path):
    """Of two steps in every run, for the README (tests/test_docs.py)."""
    words = ["--ranks", "3", "--steps", "4", "train.batch=50", "train.micro_batches=2"]
    printed = run_command(["verify", str(recipe(tmp_path)), *words], tmp_path)
    assert "SAME: 3 ranks learn what one process learns" in printed
    assert "=49" in printed  # the batch that cannot be shared equally
    assert "of a parameter's gradient on one rank would show" in " ".join(printed.split())


FLAT = ("model={use: mlp, inputs: 64, hidden: [8], classes: 10}", "dataset.as_image=false")


def loud(job: Job, waiting: object = None) -> int:
    """A job that prints, and so does a process that it has started."""
    print("a model is made")
    subprocess.run(["echo", "a forward"], check=True)
    return run_in_forks(job)


def test_machines_read_json_alone_and_nothing_learned_proves_nothing(tmp_path, monkeypatch, capfd):
    """What the model printed stood before the JSON."""
    path = recipe(tmp_path, norm="none", optimizer="sgd")
    for name in ("run", "run_alone"):
        monkeypatch.setattr(sides, name, loud)
    status = verify_here(path, [*FLAT, "schedule.learning_rate=1e-300"], steps=2, as_text=False)
    screens = capfd.readouterr()
    told = json.loads(screens.out)
    assert (told["verdict"], told["status"], told["ranks"], told["where"]) == ("proves nothing", 3, 2, None)
    assert status == 3
    assert told["float64"]["rows"]["gradient"]["r"] <= told["allowed"]
    assert screens.err.count("a model is made") == screens.err.count("a forward") == 3


class Broken(nn.Layer):
    """Cannot be made, or cannot compute its outputs."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64 if late else 0.5, 16), nn.Linear(15, 10)

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.body(samples))


@pytest.mark.parametrize(
    ("late", "says", "line"),
    [
        (False, "cannot be made", "self.body, self.head ="),
        (True, "fails on its first batch", "return self.head(self"),
    ],
)
def test_a_model_that_fails_is_told_once_with_its_line_before_ranks_start(tmp_path, late, says, line):
    """Two ranks told it twice each: in float64, and in its own precision."""
    words = f"model={{use: tests.proof.test_verify.Broken, late: {str(late).lower()}}}"
    done = verify(str(recipe(tmp_path)), words, "dataset.as_image=false")
    assert done.returncode == 4, done.stdout + done.stderr
    assert (
        done.stderr.count(says) == done.stderr.count(line) == done.stderr.count("test_verify.py, line") == 1
    )
    assert "running" not in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.strip().endswith("nothing was compared.")


class Loud(nn.Sequential):
    """Prints while it is made and while it runs."""

    def __init__(self):
        print("a model is made")
        super().__init__(nn.Linear(64, 10))

    def forward(self, samples):
        print("a forward")
        return super().forward(samples)


@pytest.mark.long
def test_stdout_is_json_alone(tmp_path):
    """As test_machines_read_json_alone_and_nothing_learned_proves_nothing has it, of processes that are started."""
    mine = ("model={use: tests.proof.test_verify.Loud}", "dataset.as_image=false")
    words = ("--steps", "2", "--json", "strategy={use: data_parallel}")
    done = verify(str(recipe(tmp_path)), *mine, *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"] == "same"


@pytest.mark.processes
def test_a_program_is_compared(tmp_path):
    """A compiled model was refused, for its float64 was traced in float32."""
    words = (*FLAT, "train.compile=true", "strategy.sync_batch_norm=false")
    verdict = verdict_in_forks(SideRunner(recipe(tmp_path, norm="none"), words, 1, 2, tmp_path))
    assert verdict.status == 0 and verdict.wide.same and verdict.candidate.failed is None


@pytest.mark.processes
def test_the_steps_after_a_checkpoint_are_compared(tmp_path):
    """With the optimizer's states and the schedule of then, in any layout; on both sides from the same checkpoint."""
    path = recipe(tmp_path, optimizer="adamw", peak=0.01)
    path.write_text(f"{path.read_text()}callbacks: [{{use: checkpoint, every: 4 steps, keep: 9}}]\n")
    run = Job(
        recipe=path,
        ranks=1,
        overrides=("strategy={use: single}", "train.length=6 steps"),
        output_dir=tmp_path / "run",
    )
    assert run_in_forks(run) == 0
    words = (f"output_dir={tmp_path / 'run'}", "strategy={use: hybrid, sharding: 2, sharding_stage: 3}")
    with pytest.raises(UsageError, match="no checkpoint of step 3 or before"):
        verify_here(path, words, at="3")
    assert _checkpoint("5", tmp_path / "run").name == "step-00000004"
    verdict = verdict_in_forks(
        SideRunner(path, words, 2, 2, tmp_path, start=_checkpoint("5", tmp_path / "run"))
    )
    assert verdict.status == 0
    saved = load(tmp_path / "run" / "checkpoints" / "step-00000004")
    for side in (verdict.reference, verdict.candidate):
        weight = side.trace("own").array(key_of("initial", 0, "head.weight"))
        np.testing.assert_array_equal(weight, saved.read("model/head.weight"))
    wide = verdict.reference.trace("wide")
    assert wide.array(key_of("state", 2, "head.weight/beta1_pow_acc")).item() == pytest.approx(0.9**7)


def test_a_layout_that_cannot_be_is_refused_before_anything_is_computed(tmp_path):
    done = verify(str(recipe(tmp_path)), "strategy={use: hybrid, tensor: 2}")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "tensor 2 needs a model with `cuts` tables" in done.stderr
    assert "on 1 rank" not in done.stderr  # one process has not begun


@pytest.mark.processes
def test_a_callback_that_asks_for_a_layout_is_not_asked_on_the_one_process(tmp_path):
    """The timeline of a pipeline, and a guard that asks for checkpoints: their recipes could not be verified."""
    path = recipe(tmp_path, norm="none")
    path.write_text(f"{path.read_text()}callbacks: [{{use: timeline}}, {{use: checkpoint}}]\n")
    path.write_text(f"{path.read_text()}guard: {{non_finite: rewind}}\n")
    with comparisons_in_forks():
        assert SideRunner(path, (), 1, 2, tmp_path, wide=False).run_reference([]).ranks == 1


def test_one_rank_has_nothing_to_compare(tmp_path):
    with pytest.raises(UsageError, match="2 ranks or more"):
        verify_here(recipe(tmp_path), ranks=1)


FOUND = {
    "one_gradient": ("gradient", "gradient of body.4.weight is off by 0."),
    "no_exchange": ("gradient", "on the data axis is"),
    "mean_of_means": ("gradient", "equal shares agree, unequal ones"),
    "local_norm": ("output", "the forward output of body.1 is the first that differs"),
    "held_out_twice": ("evaluation", " of the held-out samples is "),
    "nothing_counts": (
        "samples",
        "nothing in the batch counts for the loss on the ranks, and something on one",
    ),
    "moved_buffer": ("buffer", "buffer clock"),
    "faster": ("update", "update of body.4.weight is off by 1 % of one process's, with equal gradients"),
}


@pytest.fixture(scope="module")
def convnet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convnet")
    path = recipe(folder)
    cases = {fault: ((), {"steps": 2, "patch": FAULTS + fault}) for fault in FOUND}
    many = run_sides(path, folder / "many", 2, cases)
    with comparisons_in_forks():
        return SideRunner(path, (), 2, 2, folder).run_reference(list(many.values())), many


@pytest.mark.processes
@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_is_found_and_its_place_is_named(convnet, fault):
    one, many = convnet
    kind, says = FOUND[fault]
    verdict = compare_sides(one, many[fault])
    assert verdict.status == 1
    assert verdict.first_difference is not None and verdict.first_difference.kind == kind, (
        verdict.first_difference
    )
    assert says in verdict.first_difference.sentence


@dataclass(frozen=True, kw_only=True)
class OneClass:
    """Digits; the held-out ones are all of class `held_out`."""

    held_out: int

    def build(self, split: str) -> list[Any]:
        inputs = np.random.RandomState(0).rand(30, 64).astype("float32")
        return [(row, n % 10 if split == "train" else self.held_out) for n, row in enumerate(inputs)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("layout", "nothing_held_out"),
    [
        ("{use: hybrid, sharding: 2, sharding_stage: 3}", "metrics=[{use: auc}]"),
        pytest.param("{use: data_parallel}", "loss.ignore_index=3", marks=pytest.mark.long),
    ],
)
def test_fixed_names_and_held_out_samples_without_a_number_refuse_no_rehearsal(
    tmp_path, layout, nothing_held_out
):
    """A model is built once for each run of a proof, in one process: Paddle refused the second of a fixed name. A
    metric that fails ended both sides, and so did samples of which none counts: of so few, and not of all."""
    words = (
        "model={use: tests.part.fixed_names.FixedNames}", f"strategy={layout}", nothing_held_out,
        "dataset={use: tests.proof.test_verify.OneClass, held_out: 3}",
    )  # fmt: skip
    with comparisons_in_forks():
        assert verify_here(recipe(tmp_path), words, steps=2, rehearse=True) == 0


class Referred(nn.Layer):
    """Its outputs depend on which sample comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, samples: paddle.Tensor) -> paddle.Tensor:
        hidden = self.body(samples)
        return self.head(hidden + 0.5 * hidden[:1])


@pytest.mark.processes
def test_what_another_order_of_samples_does_excuses_nothing(tmp_path):
    """It was measured as if it were rounding, and so large that a step of SGD on two ranks was the same."""
    path = recipe(tmp_path, optimizer="sgd")
    mine = ("model={use: tests.proof.test_verify.Referred}", "dataset.as_image=false")
    verdict = verdict_in_forks(SideRunner(path, (*mine, "strategy={use: data_parallel}"), 2, 2, tmp_path))
    assert verdict.status == 1
    assert "with the samples of each micro-batch in another order" in verdict.sentences[0]
    assert verdict.first_difference is not None and verdict.first_difference.kind == "output"
    assert not verdict.wide.without_gradient


class Narrow(nn.Layer):
    def forward(self, hidden):
        if hidden.dtype == paddle.float64:
            raise TypeError("written for float32")
        return hidden


class LastIsNarrow(nn.Sequential):
    """Its last stage only is written for float32."""

    def __init__(self):
        super().__init__(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10), Narrow())


@pytest.mark.long
@pytest.mark.processes
def test_a_stage_that_has_no_float64_is_the_cause_and_the_rest_is_compared(tmp_path, capfd):
    """Its rank went on alone, and what was said was that two ranks' messages did not match."""
    path = recipe(tmp_path, optimizer="sgd")
    mine = ("model={use: tests.proof.test_verify.LastIsNarrow}", "dataset.as_image=false")
    words = (*mine, "strategy={use: hybrid, pipeline: 2}")
    verdict = verdict_in_forks(SideRunner(path, words, 2, 2, tmp_path))
    assert verdict.status == 0
    sentences = " ".join(verdict.sentences)
    assert "Not compared in float64: TypeError: written for float32 (" in sentences
    assert "tests/proof/test_verify.py, line " in sentences
    assert verdict.candidate.failed.endswith("(on rank 1 only)")
    assert "written for float32" in capfd.readouterr().err


@pytest.mark.long
@pytest.mark.processes
def test_a_recipe_that_begins_with_given_weights_is_compared_from_these(tmp_path):
    """It began from random ones, so that a frozen body was another one than in the training."""
    paddle.seed(11)
    layers = {"body.0": nn.Linear(64, 16), "body.2": nn.Linear(16, 16)}
    given = {
        f"{name}.{kind}": getattr(layer, kind)
        for name, layer in layers.items()
        for kind in ("weight", "bias")
    }
    paddle.save(given, str(tmp_path / "body.pdparams"))
    path = tmp_path / "case.yaml"
    path.write_text(
        "model: {use: mlp, inputs: 64, hidden: [16, 16], classes: 10}\ndataset: {use: digits}\n"
        f"load: {{path: {tmp_path}/body.pdparams, only: [body.*]}}\nloss: {{use: cross_entropy}}\n"
        "optimizer: {use: adamw, groups: [{match: body, frozen: true}]}\n"
        "schedule: {use: constant, learning_rate: 0.01}\n"
        "strategy: {use: hybrid, sharding: 2, sharding_stage: 3}\ntrain: {length: 1 epoch, batch: 50}\n"
    )
    verdict = verdict_in_forks(SideRunner(path, (), 2, 2, tmp_path))
    assert verdict.status == 0
    trace = verdict.reference.trace("own")
    for name, weight in given.items():
        np.testing.assert_array_equal(trace.array(key_of("initial", 0, name)), weight.numpy(), err_msg=name)
    drawn = trace.array(key_of("initial", 0, "head.weight"))
    assert drawn.std() > 0.01 and trace.noise(key_of("gradient", 1, "head.weight")) is not None
