"""A verdict of `paddle-dp verify` is named by the training that it is about, and by no other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.certificate import verified
from paddle_dp.identity.facts import RunSignature
from paddle_dp.mesh import Mesh
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.train.run import Proof

RECIPE = """
model: {use: net.Net}
dataset: {use: digits}
loss: {use: cross_entropy}
optimizer: {use: sgd}
schedule: {use: constant, learning_rate: 0.1}
strategy: {use: data_parallel}
train: {length: 3 steps, batch: 8}
"""
NET = """
import paddle
from paddle import nn

class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(x.flatten(1))
"""
DATA = {"train": {"samples": 1437, "read": {"sample 0": "float32[64] 12345678", "samples 4, 8": "0e11c5aa"}}}


def of_ranks(ranks: int) -> Mesh:
    return Mesh(ranks=ranks)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of the user's own and its recipe, in which this process now is."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "a.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "net", raising=False)
    return tmp_path


def read(*words: str) -> Recipe:
    return read_recipe(Path("a.yaml"), words)


def verify(recipe: Recipe, ranks: int = 2, status: int = 0, **more: Any) -> str:
    """Keeps a verdict as `paddle-dp verify` does."""
    facts = verified.facts_of(recipe, of_ranks(ranks))
    told = {"recipe": recipe.name, "steps": 8, "rehearsed": False, **more}
    return verified.keep(recipe, status, verified.verdict_of(facts, DATA) | told)


def looked_up(recipe: Recipe, ranks: int = 2, data: Any = DATA) -> Proof:
    return verified.Verdicts(recipe, of_ranks(ranks), RunSignature(facts={}, data=data))()


def test_a_verdict_is_named_by_its_training(written: Path) -> None:
    before = looked_up(read())
    assert before.verdict is None
    assert before.sentence == (
        "none yet that this is one process's result: paddle-dp verify runs/a/recipe.yaml --ranks 2"
    )
    line = verify(read())
    (kept,) = (written / "runs/.verified").iterdir()
    assert str(kept.relative_to(written)) in line
    named = looked_up(read())
    assert named.verdict is not None and named.verdict.startswith(kept.stem.rpartition("-")[2])
    assert named.sentence.startswith("verified on 2 ranks, ")
    assert named.sentence.endswith("this code and data: one process's result (8 steps)")


@pytest.mark.parametrize(
    "words",
    [
        ["train.length=9 epochs"], ["callbacks=[]"], ["output_dir=elsewhere/b"], ["train.max_time=60 s"],
        ["loader.num_workers=1"], ["name=b"], ["strategy.check_every=7 steps"], ["train.patience=60 s"],
    ],
)  # fmt: skip
def test_what_decides_nothing_is_no_other_training(written: Path, words: list[str]) -> None:
    verify(read())
    assert looked_up(read(*words)).verdict is not None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.batch=9"], "with another train.batch: "),
        (["train.precision=bfloat16"], "with another train.precision: "),
        (["optimizer.use=adamw"], "with another optimizer.use"),
        (["train.seed=1"], "with another train.seed: "),
        (["guard.non_finite=skip"], "with another guard.non_finite: "),
    ],
)
def test_the_verdict_of_another_recipe_is_no_proof(written: Path, words: list[str], said: str) -> None:
    verify(read())
    proof = looked_up(read(*words))
    assert proof.verdict is None
    assert (
        proof.sentence.startswith("no proof of this training: verified on 2 ranks, ")
        and said in proof.sentence
    )
    assert "paddle-dp verify" in proof.sentence and "one process's result" not in proof.sentence


def test_the_verdict_of_other_ranks_code_data_or_versions_is_no_proof(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify(read())
    assert ", and now 3 ranks: paddle-dp verify runs/a/recipe.yaml --ranks 3" in looked_up(read(), 3).sentence
    other = {"train": {"samples": 1437, "read": {**DATA["train"]["read"], "samples 4, 8": "00000000"}}}
    nothing = {"train": {"samples": 1437, "read": {}}}
    for data in (other, nothing, {"train": {**DATA["train"], "samples": 9}}):
        proof = looked_up(read(), data=data)
        assert proof.verdict is None and ", of other data: " in proof.sentence
    with monkeypatch.context() as version:
        version.setattr(verified, "packages", lambda mesh: {"package paddle": "9.9"})
        assert looked_up(read()).verdict is None
    assert looked_up(read()).verdict is not None
    (written / "net.py").write_text(NET.replace("64, 10)", "64, 10, bias_attr=False)"))
    proof = looked_up(read())
    assert proof.verdict is None and ", of other code (models net.Net" in proof.sentence


def test_a_proof_that_verify_contradicts_is_gone(written: Path) -> None:
    verify(read())
    assert verify(read(), status=1) == ""
    assert looked_up(read()).verdict is None and not list((written / "runs/.verified").iterdir())


def test_what_lies_there_otherwise_is_no_verdict(written: Path) -> None:
    verify(read())
    (kept,) = (written / "runs/.verified").iterdir()
    for content in (b"", b"{}", b"[1]", b"\xff", kept.read_bytes()[:-9], b'{"format": 1, "data": 3}'):
        kept.write_bytes(content)
        assert looked_up(read()).verdict is None
    kept.unlink()
    kept.symlink_to(written / "a.yaml")
    assert looked_up(read()).verdict is None
    (written / "runs/.verified").rename(written / "aside")
    (written / "runs/.verified").write_text("")
    assert "was not kept" in verify(read())


def test_a_step_by_step_proof_says_so(written: Path) -> None:
    words = ["strategy={use: hybrid, data: 2, reduce_dtype: bfloat16}"]
    verify(read(*words), rehearsed=True)
    said = looked_up(read(*words)).sentence
    assert said.endswith(
        "one process's result, step by step (8 steps, an evaluation, a checkpoint and a resume)"
    )


def train(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paddle_dp", "train", "a.yaml", "--ranks", "2", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.processes
def test_train_verify_proves_and_then_trains(written: Path) -> None:
    """And who trains the same again, or something else, is told."""
    done = train("--verify")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SAME: 2 ranks learn what one process learns" in done.stdout
    named = "  the proof    verified on 2 ranks, "
    assert done.stdout.count(named) == 2 and done.stdout.splitlines()[-1].startswith(named)
    certificate = (written / "runs/a/certificate.json").read_text()
    (kept,) = (written / "runs/.verified").glob("*.json")
    assert f'"verdict": "{kept.stem.rpartition("-")[2]}' in certificate
    other = train("train.batch=9")
    assert other.returncode == 0 and "one process's result" not in other.stdout
    assert other.stdout.count("  the proof    no proof of this training: verified on 2 ranks, ") == 2


@pytest.mark.processes
def test_train_verify_does_not_train_what_differs(written: Path) -> None:
    mixes = NET.replace("x.flatten(1)", "x.flatten(1) - x.flatten(1).mean(0)")
    (written / "net.py").write_text(mixes)
    done = train("--verify")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERENT" in done.stdout and "Nothing was trained: --verify asks for a proof" in done.stdout
    assert not (written / "runs/a").exists() and not (written / "runs/.verified").exists()
