"""A start that is refused leaves the run of that name where it is, with every byte of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from paddle_dp.launch.command import Job
from tests.house.recipes import small_recipe
from tests.jobs import run_in_one_fork

RECIPE = small_recipe(
    "length: 2 steps, batch: 32",
    model="mlp, inputs: 64, hidden: [8], classes: 10",
    callbacks="[{use: evaluate}, {use: checkpoint}, {use: metrics}]",
)
EMPTY = """
class Nothing:
    def __init__(self, split): pass
    def __len__(self): return 0
    def __getitem__(self, index): raise IndexError(index)
"""


def content(folder: Path) -> dict[str, str]:
    """The digest of each file of a run, without the logs of attempts."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "logs" not in path.parts)
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in files
        if p.name != ".lock"
    }


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, whose run is trained."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "small.yaml").write_text(RECIPE)
    (folder / "nothing.py").write_text(EMPTY)
    status, _, complained = run_in_one_fork(Job(recipe=Path("small.yaml")), folder)
    assert status == 0, complained
    return folder


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "word", "said"),
    [
        (2, "callbacks.checkpoint.best=f1", "best: evaluations of this model have no number"),
        pytest.param(
            2, "dataset={use: text_files, tokenizer: gpt2}", "dataset.tokenizer: gpt2 does not exist",
            marks=pytest.mark.long,  # refused by the ranks, as the first
        ),
        (2, "strategy={use: hybrid, tensor: 3}", "tensor"),
        (1, "dataset={use: nothing.Nothing}", "the train split is empty"),
        (1, "callbacks.3={use: early_stop, watch: val_loss}", "watch: evaluations of this model have no number"),
        (1, "train.length=0.001 epochs", "train.length: '0.001 epochs' is no training"),
        (1, "train.bacth=3", "has no setting 'bacth'"),
    ],
)  # fmt: skip
def test_a_refused_start_moves_nothing(good: Path, ranks: int, word: str, said: str) -> None:
    """It moved the good run to NAME.1, before the ranks had looked at anything."""
    before = content(good / "runs/small")
    refused = Job(recipe=Path("small.yaml"), overrides=(word,), ranks=ranks)
    status, _, complained = run_in_one_fork(refused, good)
    assert status == 2 and said in complained, complained
    assert content(good / "runs/small") == before and before
    assert not (good / "runs/small.1").exists()


@pytest.mark.processes
def test_a_users_own_folder_of_code_is_not_replaced(good: Path) -> None:
    """A start deleted it, with its .git."""
    project = good / "project"
    (project / "code/.git").mkdir(parents=True)
    (project / "code/tool.py").write_text("mine")
    before = content(project)
    status, _, complained = run_in_one_fork(Job(recipe=Path("small.yaml"), output_dir="project"), good)
    assert status == 2 and "project/code is not from a run" in complained, complained
    assert content(project) == before and [path.name for path in project.iterdir()] == ["code"]


@pytest.mark.processes
def test_a_refused_resume_leaves_the_recipe_of_the_run(good: Path) -> None:
    before = content(good / "runs/small")
    refused = Job(recipe=Path("small.yaml"), overrides=("optimizer.use=sgd",), resume="newest")
    status, _, complained = run_in_one_fork(refused, good)
    assert status == 2 and content(good / "runs/small") == before, complained


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_starts_moves_it_and_keeps_its_own_logs(good: Path, ranks: int) -> None:
    before, number = content(good / "runs/small"), len(list((good / "runs").iterdir()))
    job = Job(recipe=Path("small.yaml"), overrides=(f"train.seed={ranks}",), ranks=ranks)
    status, said, complained = run_in_one_fork(job, good, forks=True)
    assert status == 0, complained
    aside = good / f"runs/small.{number}"
    assert f"the earlier run is now runs/{aside.name}" in said and content(aside) == before
    assert (good / "runs/small/checkpoints").is_dir() and (good / "runs/small/.lock").exists()
    (attempt,) = (good / "runs/small/logs").iterdir()
    assert not (aside / "logs" / attempt.name).exists()
    assert (attempt / "workerlog.0").exists() == (ranks == 2)
