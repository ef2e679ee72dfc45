"""The last line of a training that ended too early: how it goes on, or that it cannot yet."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from paddle_dp import cli
from paddle_dp.checkpoint.disk import Digest
from paddle_dp.checkpoint.manifest import Checks, Manifest
from paddle_dp.launch.command import Job
from paddle_dp.launch.resume import command, how_to_resume

JOB = Job(recipe=Path("a.yaml"), overrides=("train.batch=64",), ranks=2)
GOOD, NAN = (Checks(agreed=True, finite=finite, step=1) for finite in (True, False))


def save(run: Path, step: int, checks: Checks | None) -> None:
    """A checkpoint as far as its manifest goes."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    names = ("state.json", "rank-00000.safetensors", "rank-00000.json")
    Manifest(1, {name: Digest(1, 1) for name in names}, checks).write(folder)


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


@pytest.mark.parametrize("job", [replace(JOB, task="evaluate"), replace(JOB, nodes=2, node_rank=1)])
def test_only_a_training_goes_on_and_only_the_first_node_says_so(tmp_path: Path, job: Job) -> None:
    save(tmp_path, 10, GOOD)
    assert how_to_resume(job, tmp_path) is None


def test_several_nodes_each_go_on(tmp_path: Path) -> None:
    save(tmp_path, 10, GOOD)
    job = replace(JOB, nodes=2, master="10.0.0.1:9701", node_rank=0)
    said = str(how_to_resume(job, tmp_path))
    assert said.startswith("go on from step 10, with its --node-rank on each node: ")
    assert said.endswith("--ranks 2 --nodes 2 --master 10.0.0.1:9701 --node-rank 0 --resume")


@pytest.mark.parametrize(
    "job",
    [
        Job(recipe=Path("a.yaml")),
        Job(recipe=Path("my runs/a.yaml"), overrides=("callbacks=[{use: metrics}]", "x='$y'"), ranks=3),
        Job(recipe=Path("a.yaml"), devices=(0, 3), output_dir=Path("runs/b c"), resume="runs/x"),
        Job(recipe=Path("a.yaml"), nodes=2, master="host:9701", node_rank=0),
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
