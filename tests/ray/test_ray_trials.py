"""The trials of a sweep as actors of a Ray cluster. Ray is played here; test_ray_cluster.py starts a real one."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from paddle_dp.errors import InstallError, UsageError
from paddle_dp.launch.nodes.rendezvous import LOST_STATUS
from paddle_dp.ray import RayExecutor
from paddle_dp.ray.ray_trials import RayTrial, TrialProcess


class RayError(Exception):
    """Ray's."""


class PlayedRay:
    """A cluster with these resources, whose actors run in this process when they are asked for."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, **resources: float):
        self.resources, self.over, self.killed = resources, True, list[Any]()

    def is_initialized(self) -> bool:
        return True

    def cluster_resources(self) -> dict[str, float]:
        return self.resources

    def wait(self, runs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return (runs, []) if self.over else ([], runs)

    def get(self, run: Any) -> Any:
        if isinstance(run, RayError):
            raise run
        return run

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


def executor(monkeypatch: pytest.MonkeyPatch, ranks: int, gpus: int, **resources: float) -> RayExecutor:
    monkeypatch.setitem(sys.modules, "ray", PlayedRay(**resources))  # type: ignore[arg-type]
    return RayExecutor(ranks, gpus)


@pytest.mark.parametrize(
    ("gpus", "resources", "options"),
    [
        (2, {"CPU": 8.0}, (2, 0)),
        (2, {"CPU": 8.0, "GPU": 4.0}, (2, 2)),
        (4, {"CPU": 8.0, "GPU": 4.0}, (2, 4)),  # two cards for each rank
        (0, {"CPU": 8.0, "GPU": 4.0}, (2, 0)),
    ],
)
def test_a_trial_takes_gpus_where_the_cluster_has_some(
    monkeypatch: pytest.MonkeyPatch, gpus: int, resources: dict[str, float], options: tuple[int, int]
) -> None:
    made = executor(monkeypatch, 2, gpus, **resources).options
    assert (made["num_cpus"], made["num_gpus"]) == options


def test_a_trial_is_one_node_whatever_srun_says_if_it_has_started_the_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = executor(monkeypatch, 1, 0, CPU=2.0)
    monkeypatch.setattr(made.ray, "remote", remote := MagicMock(), raising=False)
    made.start(["train", "r.yaml", "--resume=3"], 0, tmp_path / "screen.txt")
    run = remote().options().remote().run.remote
    assert run.call_args.args[0] == ["train", "r.yaml", "--resume=3", "--nodes", "1"]


def test_a_trial_that_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--ranks 8 needs 7 GPUs, and the Ray cluster has 4; `ray status`"):
        executor(monkeypatch, 8, 7, CPU=64.0, GPU=4.0)
    with pytest.raises(UsageError, match="--ranks 8 needs 8 processors, and the Ray cluster has 4"):
        executor(monkeypatch, 8, 7, CPU=4.0, GPU=8.0)


def test_without_ray_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InstallError, match=r"sweep --ray needs Ray: pip install 'paddle_dp\[ray\]'"):
        RayExecutor(1, 0)


def test_a_trial_ends_with_its_status_or_as_lost_and_gives_its_resources_back(tmp_path: Path) -> None:
    ray, screen = PlayedRay(), tmp_path / "screens" / "trial-000.txt"
    done = RayTrial(ray, "actor 0", 75, screen)
    ray.over = False
    assert done.poll() is None and not ray.killed
    ray.over = True
    assert done.poll() == done.poll() == 75
    lost = RayTrial(ray, "actor 1", RayError("the node died\nmore"), screen)
    assert lost.poll() == LOST_STATUS
    assert screen.read_text() == "the trial's actor is lost: the node died\n"
    assert ray.killed == ["actor 0", "actor 1"]


def test_a_trial_that_waits_for_room_ends_at_once(tmp_path: Path) -> None:
    """Its actor would hear of a request only once it has room, and a second Ctrl-C waited for that."""
    ray = PlayedRay()
    RayTrial(ray, "actor 0", "run", tmp_path / "screen.txt").kill()
    assert ray.killed == ["actor 0"]


@pytest.mark.processes
def test_an_actor_writes_the_screen_and_stops_its_process(tmp_path: Path) -> None:
    screen = tmp_path / "screens" / "trial-000.txt"
    actor = TrialProcess(str(tmp_path), {})
    assert actor.run(["train", "absent.yaml"], str(screen)) == 2
    assert "absent.yaml" in screen.read_text()
    late = TrialProcess(str(tmp_path), {})
    late.stop()  # before it begins
    began = time.monotonic()
    assert late.run(["dashboard", str(tmp_path)], str(screen)) == -signal.SIGTERM
    assert time.monotonic() - began < 20
