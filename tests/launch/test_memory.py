"""The folder in memory of a job's checkpoints: who gets one, and that it is gone however the job ends."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.errors import UsageError
from paddle_dp.launch import memory
from paddle_dp.launch.command import Job, LaunchPlan, environment
from paddle_dp.launch.machine import Machine
from paddle_dp.launch.memory import memory_folder, stock
from paddle_dp.mesh.environment import MEMORY
from tests.eventually import eventually

PLAN = LaunchPlan(job=Job(recipe=Path("a.yaml"), ranks=2, restarts=3), machine=Machine(cores=2), ranks=2)


def recipe(*callbacks: str, seed: int = 0, may_lose_ranks: bool = False) -> Any:
    strategy = SimpleNamespace(config=SimpleNamespace(may_lose_ranks=may_lose_ranks))
    return SimpleNamespace(
        callbacks=[SimpleNamespace(name=name) for name in callbacks], strategy=strategy,
        model_dump_json=lambda: f"{callbacks} {seed}",
    )  # fmt: skip


KEEPS = recipe("metrics", "memory_checkpoint")


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "FOLDER", tmp_path)
    return tmp_path


@pytest.mark.processes
def test_the_ranks_of_a_training_that_keeps_some_learn_of_it_and_it_is_gone_at_the_end(parent: Path) -> None:
    with memory_folder(KEEPS, PLAN) as folder:
        assert folder is not None and folder.parent == parent and folder.stat().st_mode & 0o777 == 0o700
        assert (folder / "checkpoints").is_dir()
        variables = environment(replace(PLAN, memory=folder), {})
        assert variables[MEMORY] == str(folder)
        # A job within a rank has none, or one of its own.
        assert MEMORY not in environment(PLAN, variables)
    assert not list(parent.iterdir())


def test_nobody_else_gets_one(parent: Path) -> None:
    evaluates = replace(PLAN, job=replace(PLAN.job, entry_point="evaluate"))
    for asked, plan in ((recipe("checkpoint"), PLAN), (KEEPS, evaluates)):
        with memory_folder(asked, plan) as folder:
            assert folder is None and not list(parent.iterdir())


LOSES = recipe("memory_checkpoint", may_lose_ranks=True)


@pytest.mark.parametrize(
    ("asked", "plan", "words"),
    [(KEEPS, replace(PLAN, job=replace(PLAN.job, restarts=0)), "Add --restarts 3"),
     (LOSES, replace(PLAN, nodes=2), "on several nodes a rank that this strategy goes on without")],
)  # fmt: skip
def test_a_job_that_could_not_use_it_is_refused(
    parent: Path, asked: Any, plan: LaunchPlan, words: str
) -> None:
    with pytest.raises(UsageError, match=words), memory_folder(asked, plan):
        pass
    assert not list(parent.iterdir())


@pytest.mark.processes
def test_a_node_tells_the_others_of_its_memory_and_of_which_job_it_is(parent: Path) -> None:
    jobs = []
    for asked in (KEEPS, KEEPS, recipe("metrics", "memory_checkpoint", seed=1)):
        with memory_folder(asked, replace(PLAN, nodes=2)) as folder:
            told = stock(folder)
            assert told is not None and told["generations"] == []
            jobs.append(told["job"])
    assert jobs[0] == jobs[1] != jobs[2] and all(jobs)
    assert stock(None) is None and stock(folder) == {"job": "", "generations": []}  # it has been removed


def test_a_message_has_spans_of_ranks_not_each_of_thousands() -> None:
    for ranks in ((), (0,), (0, 1, 2, 5, 7, 8), tuple(range(4096))):
        assert memory._ranks(memory._spans(ranks), 4096) == ranks
    assert memory._spans(range(4096)) == [[0, 4095]] and memory._spans((0, 1, 5)) == [[0, 1], [5, 5]]
    assert memory._ranks([[0, 10**12]], 3) == (0, 1, 2)  # another program's message takes no memory


HOLDS = """
import sys, time
from paddle_dp.launch import memory
from pathlib import Path
from tests.launch.test_memory import KEEPS, PLAN
memory.FOLDER = Path(sys.argv[1])
with memory.memory_folder(KEEPS, PLAN) as folder:
    (folder / "checkpoints" / "much").write_text("x")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.mark.processes
def test_after_a_kill_of_the_job_it_is_gone_at_once(parent: Path) -> None:
    job = subprocess.Popen([sys.executable, "-c", HOLDS, str(parent)], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    folder = Path(job.stdout.readline().strip())
    assert (folder / "checkpoints" / "much").exists()
    job.kill()
    job.wait()
    eventually(lambda: not folder.exists(), 10)


def test_after_a_kill_of_everything_the_next_training_removes_it(parent: Path) -> None:
    (parent / "paddle-dp-memory-old").mkdir()
    (parent / "paddle-dp-memory-old" / ".lock").touch()
    (parent / "another's").mkdir()
    with memory_folder(recipe("checkpoint"), PLAN):
        assert [path.name for path in parent.iterdir()] == ["another's"]
