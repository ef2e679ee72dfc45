"""A verdict of `paddle-dp verify` is named by the training that it is about, and by no other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle import nn

from paddle_dp import cli
from paddle_dp.certificate import verified
from paddle_dp.identity.facts import RunSignature
from paddle_dp.launch import start
from paddle_dp.launch.command import Job
from paddle_dp.launch.recipe_rank import work
from paddle_dp.mesh import Mesh
from paddle_dp.recipe import Recipe, read_recipe
from paddle_dp.train.run import Proof
from tests.certificate.proven import assert_proven
from tests.house.recipes import small_recipe
from tests.jobs import comparisons_in_forks
from tests.ranks import run_ranks

RECIPE = small_recipe(
    "length: 3 steps, batch: 8", model="net.Net", optimizer="sgd", schedule="constant, learning_rate: 0.1",
    strategy="data_parallel",
)  # fmt: skip
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
    result = {"recipe": recipe.name, "steps": 8, "rehearsed": False, **more}
    return verified.keep(recipe, status, verified.verdict_record(facts, DATA) | result)


def looked_up(recipe: Recipe, ranks: int = 2, data: Any = DATA) -> Proof:
    return verified.ProofSearch(recipe, of_ranks(ranks), RunSignature(facts={}, data=data))()


def test_a_verdict_is_named_by_its_training(written: Path) -> None:
    before = looked_up(read())
    assert before.verdict_key is None
    assert before.sentence == (
        "none yet that this is one process's result: paddle-dp verify runs/a/recipe.yaml --ranks 2"
    )
    line = verify(read())
    (kept,) = (written / "runs/.verified").iterdir()
    assert str(kept.relative_to(written)) in line
    named = looked_up(read())
    assert named.verdict_key is not None and named.verdict_key.startswith(kept.stem.rpartition("-")[2])
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
    assert looked_up(read(*words)).verdict_key is not None


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
    assert proof.verdict_key is None
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
        assert proof.verdict_key is None and ", of other data: " in proof.sentence
    with monkeypatch.context() as version:
        version.setattr(verified, "packages", lambda mesh: {"package paddle": "9.9"})
        assert looked_up(read()).verdict_key is None
    assert looked_up(read()).verdict_key is not None
    (written / "net.py").write_text(NET.replace("64, 10)", "64, 10, bias_attr=False)"))
    proof = looked_up(read())
    assert proof.verdict_key is None and ", of other code (models net.Net" in proof.sentence


def test_a_proof_that_verify_contradicts_is_gone(written: Path) -> None:
    verify(read())
    assert verify(read(), status=1) == ""
    assert looked_up(read()).verdict_key is None and not list((written / "runs/.verified").iterdir())


def test_what_lies_there_otherwise_is_no_verdict(written: Path) -> None:
    verify(read())
    (kept,) = (written / "runs/.verified").iterdir()
    for content in (b"", b"{}", b"[1]", b"\xff", kept.read_bytes()[:-9], b'{"format": 1, "data": 3}'):
        kept.write_bytes(content)
        assert looked_up(read()).verdict_key is None
    kept.unlink()
    kept.symlink_to(written / "a.yaml")
    assert looked_up(read()).verdict_key is None
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


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return super().forward(x.flatten(1))


class Mixing(Net):
    """Its outputs depend on the other samples of the batch."""

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return super().forward(x.flatten(1) - x.flatten(1).mean(0))


def screen(recipe: str, words: list[str]) -> str:
    """In a rank: trains, and returns what it printed."""
    with redirect_stdout(StringIO()) as printed:
        work("train", Path(recipe), words, {})
    return printed.getvalue()


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """`paddle-dp train --verify` in this process, with forks as its ranks: the exit status, and rank 0's screen."""
    (tmp_path / "a.yaml").write_text(RECIPE.replace("net.Net", f"{__name__}.Net"))
    screens: list[str] = []
    started = subprocess.run

    def process(command: list[str], **how: Any) -> Any:
        if command[1:4] != ["-m", "paddle_dp", "verify"]:
            return started(command, **how)
        with comparisons_in_forks():
            return SimpleNamespace(returncode=leave(*command[3:]))

    def job(asked: Job) -> int:
        screens.append(run_ranks(screen, asked.ranks or 1, str(asked.recipe), list(asked.all_overrides))[0])
        return 0

    monkeypatch.setattr(subprocess, "run", process)
    monkeypatch.setattr(start, "run", job)

    def train(*words: str) -> tuple[int, str]:
        screens.clear()
        where = f"output_dir={tmp_path / 'runs/a'}"
        status = leave("train", str(tmp_path / "a.yaml"), "--ranks", "2", where, *words)
        return status, "".join(screens)

    return train


def leave(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    return int(caught.value.code or 0)


@pytest.mark.processes
def test_train_verify_proves_and_then_trains(
    training: Callable[..., tuple[int, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And who trains something else is told. tests/test_docs.py starts the README's for real."""
    status, printed = training("--verify")
    assert status == 0 and "SAME: 2 ranks learn what one process learns" in capfd.readouterr().out
    assert_proven(printed, tmp_path / "runs/a")
    status, printed = training("train.batch=9")
    assert status == 0 and "one process's result" not in printed
    assert printed.count("  the proof    no proof of this training: verified on 2 ranks, ") == 2


@pytest.mark.processes
def test_train_verify_does_not_train_what_differs(
    training: Callable[..., tuple[int, str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, printed = training("--verify", f"model={{use: {__name__}.Mixing}}")
    said = capfd.readouterr().out
    assert (status, printed) == (1, ""), said
    assert "DIFFERENT" in said and "Nothing was trained: --verify asks for a proof" in said
    assert not (tmp_path / "runs/a").exists() and not (tmp_path / "runs/.verified").exists()
