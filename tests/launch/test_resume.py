"""The last line of a training that ended too early: how it goes on, or that it cannot yet."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddle_dp import cli
from paddle_dp.checkpoint import set_best
from paddle_dp.checkpoint.disk import Digest
from paddle_dp.checkpoint.manifest import Checks, Manifest
from paddle_dp.launch.command import Job
from paddle_dp.launch.resume import command, how_to_resume, newest_point

JOB = Job(recipe=Path("a.yaml"), overrides=("train.batch=64",), ranks=2)
BEGAN = 1000.0  # when the job began; what was there already is older
GOOD, NAN = (Checks(agreed=True, finite=finite, step=1) for finite in (True, False))


def save(run: Path, step: int, checks: Checks | None, time: float = BEGAN) -> Path:
    """A checkpoint as far as its manifest goes."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    names = ("state.json", "rank-00000.safetensors", "rank-00000.json")
    Manifest(1, {name: Digest(1, 1) for name in names}, checks).write(folder)
    os.utime(folder / "manifest.json", (time, time))
    return folder


@pytest.mark.parametrize("checks", [GOOD, None])
def test_the_newest_checkpoint_is_gone_on_from(tmp_path: Path, checks: Checks | None) -> None:
    save(tmp_path, 10, GOOD)
    save(tmp_path, 40, checks)
    said = "go on from step 40: paddle-dp train a.yaml train.batch=64 --ranks 2 --resume"
    assert how_to_resume(JOB, tmp_path) == said


def test_one_that_is_not_good_or_not_whole_is_stepped_over(tmp_path: Path) -> None:
    save(tmp_path, 10, GOOD)
    save(tmp_path, 20, NAN)
    save(tmp_path, 30, GOOD)
    (tmp_path / "checkpoints" / "step-00000030" / "manifest.json").write_text("{")
    (tmp_path / "checkpoints" / "step-00000040").mkdir()
    (tmp_path / "checkpoints" / ".step-00000050.partial-1").mkdir()
    assert str(how_to_resume(JOB, tmp_path)).startswith("go on from step 10: ")


def test_where_nothing_was_saved_it_says_so(tmp_path: Path) -> None:
    said = f"nothing to go on from: there is no usable checkpoint in {tmp_path}/checkpoints yet"
    assert how_to_resume(JOB, tmp_path) == said
    save(tmp_path, 20, NAN)
    assert how_to_resume(JOB, tmp_path) == said


@pytest.mark.parametrize("job", [replace(JOB, entry_point="evaluate"), replace(JOB, nodes=2, node_rank=1)])
def test_only_a_training_goes_on_and_only_the_first_node_says_so(tmp_path: Path, job: Job) -> None:
    save(tmp_path, 10, GOOD)
    assert how_to_resume(job, tmp_path) is None


def chosen(tmp_path: Path) -> tuple[Path, Job]:
    """A job that was told to go on from step 20 of a run that has step 60."""
    at_20, _ = (save(tmp_path, step, GOOD, BEGAN - 1) for step in (20, 60))
    return at_20, replace(JOB, resume=str(at_20))


def test_until_it_has_saved_a_job_goes_on_from_the_checkpoint_that_was_chosen(tmp_path: Path) -> None:
    at_20, job = chosen(tmp_path)
    words = f"paddle-dp train a.yaml train.batch=64 --ranks 2 --resume {at_20}"
    assert how_to_resume(job, tmp_path, BEGAN) == f"go on from step 20: {words}"
    assert str(how_to_resume(replace(job, resume="newest"), tmp_path, BEGAN)).startswith(
        "go on from step 60: "
    )


def test_what_it_saved_itself_counts_though_a_later_step_lies_beside_it(tmp_path: Path) -> None:
    _, job = chosen(tmp_path)
    at_40 = save(tmp_path, 40, GOOD, BEGAN + 1)
    said = str(how_to_resume(job, tmp_path, BEGAN))
    assert said.startswith("go on from step 40: ") and said.endswith(f"--resume {at_40}")
    save(tmp_path, 80, GOOD, BEGAN + 2)
    said = str(how_to_resume(job, tmp_path, BEGAN))
    assert said.startswith("go on from step 80: ") and said.endswith("--resume")


def test_the_best_and_another_run_are_chosen_too(tmp_path: Path) -> None:
    at_20, job = chosen(tmp_path)
    set_best(at_20.parent, at_20, {"acc1": 0.5})
    said = str(how_to_resume(replace(job, resume="best"), tmp_path, BEGAN))
    assert said.startswith("go on from step 20: ") and said.endswith("--resume best")
    said = str(how_to_resume(replace(job, resume="20"), tmp_path, BEGAN))
    assert said.startswith("go on from step 20: ") and said.endswith("--resume 20")
    fresh = str(how_to_resume(replace(job, resume=str(tmp_path)), tmp_path / "fresh", BEGAN))
    assert fresh.startswith(f"go on from {tmp_path}: ") and fresh.endswith(f"--resume {tmp_path}")


def test_what_was_accepted_is_accepted_again(tmp_path: Path) -> None:
    save(tmp_path, 20, GOOD)
    job = replace(JOB, resume="newest", extra={"accept": ["loss.label_smoothing"], "claimed": True})
    assert str(how_to_resume(job, tmp_path)).endswith("--ranks 2 --accept loss.label_smoothing --resume")


def test_a_path_is_never_read_as_an_option_or_a_setting() -> None:
    job = Job(recipe=Path("./-odd.yaml"))
    assert command(job) == "paddle-dp train ./-odd.yaml --resume"
    assert command(job, "a=b/step-00000020").endswith("--resume ./a=b/step-00000020")


def test_several_nodes_each_go_on(tmp_path: Path) -> None:
    save(tmp_path, 10, GOOD)
    job = replace(JOB, nodes=2, master="10.0.0.1:9701", node_rank=0)
    said = str(how_to_resume(job, tmp_path))
    assert said.startswith(
        "go on from step 10, by the job's own command with --resume; where you type it on "
    )
    assert said.endswith("--ranks 2 --nodes 2 --master 10.0.0.1:9701 --node-rank 0 --resume")


@pytest.mark.parametrize(
    "job",
    [
        Job(recipe=Path("a.yaml")),
        Job(recipe=Path("my runs/a.yaml"), overrides=("callbacks=[{use: metrics}]", "x='$y'"), ranks=3),
        Job(recipe=Path("a.yaml"), devices=(0, 3), output_dir=Path("runs/b c"), resume="runs/x"),
        Job(recipe=Path("a.yaml"), nodes=2, master="host:9701", node_rank=0),
        Job(recipe=Path("a.yaml"), ranks=2, restarts=3),
        Job(
            recipe=Path("a.yaml"),
            resume="runs/x",
            extra={"accept": ["loss.label_smoothing", "optimizer.clip"]},
        ),
    ],
)
def test_a_shell_and_the_command_line_read_the_command_as_the_same_job(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Job] = []
    monkeypatch.setattr("paddle_dp.launch.start.run", lambda given: asked.append(given) or 0)
    with pytest.raises(SystemExit):
        cli.main(shlex.split(command(job))[1:])
    assert asked == [replace(job, resume="newest")]


def test_spans_are_said_as_they_were_given() -> None:
    job = replace(JOB, ranks=4, least_ranks=2, nodes=3, least_nodes=1)
    assert "--ranks 2:4 --nodes 1:3" in command(job)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "job").write_text("this")
    return tmp_path / "memory"


def stock(*steps: int, ranks: Sequence[int] = (0, 1), job: str = "this") -> dict[str, Any]:
    return {"job": job, "generations": [[step, "a" * 32, 2, [[ranks[0], ranks[-1]]]] for step in steps]}


@pytest.mark.parametrize(
    ("stocks", "saved", "resume", "label"),
    [
        ([stock(40, 50), stock()], (30,), 50, "step 50 in memory"),
        ([stock(40, 50, ranks=[0]), stock(50, ranks=[1])], (), 50, "step 50 in memory"),
        ([stock(40), stock(50, ranks=[1])], (30,), 40, "step 40 in memory (of step 50 no node's memory has the files"),
        ([stock(40), stock()], (30, 60), "step-00000060", "step 60"),
        ([stock(60), stock()], (60,), "step-00000060", "step 60"),  # no byte has to be sent for it
        ([stock(50, ranks=[0]), None], (30,), "step-00000030", "step 30 on disk (of step 50 no node's memory has"),
        ([None, None], (30,), "step-00000030", "step 30 on disk (no node's memory has a checkpoint; the memory of 2"),
        ([stock(), stock()], (30,), "step-00000030", "step 30 on disk (no node's memory has a checkpoint)"),
        ([stock(50, job="other"), stock()], (30,), "step-00000030", "the memory of 1 node is another job's"),
        ([{"job": "this", "generations": [[1, 2]]}, stock()], (30,), "step-00000030", "the memory of 1 node is"),
        ([stock(), stock()], (), None, "the beginning (no node's memory has a checkpoint)"),
    ],
)  # fmt: skip
def test_several_nodes_go_on_from_the_newest_of_their_memories_and_the_disk(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch,
    stocks: list[Any], saved: tuple[int, ...], resume: int | str | None, label: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("paddle_dp.launch.resume.check", lambda path: None)
    (tmp_path / "recipe.yaml").touch()
    for step in saved:
        save(tmp_path, step, GOOD)
    point = newest_point(JOB, tmp_path, BEGAN, print, memory, stocks)
    expected = f"memory:{resume}:{'a' * 32}" if isinstance(resume, int) else resume
    assert (point.resume and point.resume.rpartition("/")[2]) == expected and label in point.label
    if label.startswith("step "):
        assert point.step == point.saved == int(label.split()[1])


def test_the_memory_of_a_run_whose_folder_is_gone_is_not_read(tmp_path: Path, memory: Path) -> None:
    point = newest_point(JOB, tmp_path / "run", BEGAN, print, memory, [stock(50)])
    assert point.resume is None and point.label == "the beginning"
