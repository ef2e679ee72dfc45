"""A job's nodes as actors of a Ray cluster. The cluster is played here; test_ray_cluster.py starts a real one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paddle_dp.errors import InstallError, UsageError
from paddle_dp.ray import RayJob
from paddle_dp.ray.ray_job import _cause
from tests.house.programs import ROOT

RECIPE = ROOT / "tests/faults/slow.yaml"


class RayError(Exception):
    """Ray's."""


@dataclass
class PlayedRay:
    """Ray's `wait` and `get`, of runs that are (status, cause, replaced) or an error; they end in order."""

    exceptions: Any = field(default_factory=lambda: SimpleNamespace(RayError=RayError))

    def wait(self, waiting: Sequence[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return [waiting[0]], [*waiting[1:]]

    def get(self, run: Any) -> Any:
        if isinstance(run, RayError):
            raise run
        return run


class PlayedNode:
    def __init__(self) -> None:
        self.stops = 0
        self.stop = SimpleNamespace(remote=self.count)

    def count(self) -> None:
        self.stops += 1


def watched(*runs: Any) -> tuple[Any, list[int]]:
    nodes = [PlayedNode() for _ in runs]
    job = RayJob(recipe=RECIPE, nodes=len(runs))
    return job._watch(PlayedRay(), nodes, runs, Path("run")), [node.stops for node in nodes]


def test_each_node_gets_its_words() -> None:
    job = RayJob(recipe=RECIPE, settings=["train.batch=8"], nodes=2, gpus=4, restarts=1, resume=True)
    words = job.arguments(1, "10.0.0.1:70", Path("/runs/a"))
    assert words[:5] == ["train", str(RECIPE), "train.batch=8", "--ranks", "4"]
    assert " ".join(words[7:]) == "--restarts 1 --nodes 2 --master 10.0.0.1:70 --node-rank 1 --resume=newest"
    assert job.resources == {"CPU": 4.0, "GPU": 4.0}
    assert "--nodes" not in RayJob(recipe=RECIPE, nodes=1).arguments(0, "", Path("a"))


def test_a_job_that_is_done() -> None:
    result, stops = watched((0, "", False), (0, "", True))
    assert (result.status, result.cause, result.replaced, stops) == (0, "", (1,), [0, 0])


def test_the_first_cause_and_its_status_come_back() -> None:
    result, stops = watched((0, "", False), (7, "rank 1: ValueError", False))
    assert (result.status, result.cause, stops) == (7, "rank 1: ValueError", [0, 0])


def test_others_do_not_wait_for_a_node_that_is_lost_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    result, stops = watched(RayError("The actor died.\nmore"), (75, "stopped", False))
    assert result.status == 1 and result.cause.endswith("cannot replace its actor: The actor died.")
    assert stops == [0, 1] and "node 0 is lost" in capsys.readouterr().err


def test_the_cause_is_this_runs(tmp_path: Path) -> None:
    (tmp_path / "certificate.json").write_text('{"attempts": [{"why": "ValueError: of an older run"}]}')
    later = (tmp_path / "certificate.json").stat().st_mtime + 1
    assert _cause(1, tmp_path, ["a: lost", ""], later) == "a: lost"
    assert _cause(1, tmp_path, ["a: lost", ""], later - 1) == "ValueError: of an older run"
    assert _cause(2, tmp_path, ["line 1: a", "line 2: b"], later) == "line 1: a\nline 2: b"
    assert _cause(0, tmp_path, ["a"], later) == ""


def test_without_ray_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InstallError, match="pip install 'paddle_dp"):
        RayJob(recipe=RECIPE).run()


def test_numbers_are_checked() -> None:
    with pytest.raises(UsageError, match=r"RayJob\(nodes=0\): give 1 or more"):
        RayJob(recipe=RECIPE, nodes=0)
