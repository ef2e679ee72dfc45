"""A job's nodes as actors of a Ray cluster. The cluster is played here; test_ray_cluster.py starts a real one."""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from paddle_dp.cli.options import node_options
from paddle_dp.errors import InstallError, UsageError
from paddle_dp.launch.processes import Signals
from paddle_dp.ray import RayJob, ray_job
from paddle_dp.ray.ray_job import RayNode, _cause
from paddle_dp.ray.ray_trials import TrialProcess
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


def awaited(*runs: Any) -> tuple[Any, list[int]]:
    nodes = [PlayedNode() for _ in runs]
    job = RayJob(recipe=RECIPE, nodes=len(runs))
    return job._await_nodes(PlayedRay(), nodes, runs, Path("run"), Signals()), [node.stops for node in nodes]


def test_each_node_gets_its_words() -> None:
    job = RayJob(recipe=RECIPE, settings=["train.batch=8"], nodes=2, gpus=4, restarts=1, resume=True)
    words = job.arguments(1, "10.0.0.1:70", Path("/runs/a"))
    assert words[:5] == ["train", str(RECIPE), "train.batch=8", "--ranks", "4"]
    assert " ".join(words[7:]) == "--restarts 1 --nodes 2 --master 10.0.0.1:70 --node-rank 1 --resume=newest"
    assert job.resources == {"CPU": 4.0, "GPU": 4.0}


def test_one_node_says_so_for_srun_may_have_started_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was refused: Slurm had started "this command" on two nodes, and each would work alone."""
    step = {"STEP_ID": "0", "STEP_NODELIST": "a[1-2]", "STEP_NUM_NODES": "2", "STEP_NUM_TASKS": "2"}
    for name, value in {"JOB_ID": "1", "NODEID": "0", **step}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    words = RayJob(recipe=RECIPE, nodes=1).arguments(0, "", Path("a"))
    with pytest.raises(UsageError, match="each would work alone"):
        node_options(None, None, None)
    assert (
        node_options(words[words.index("--nodes") + 1], None, None)["nodes"] == 1 and "--master" not in words
    )


def test_a_job_that_is_done() -> None:
    result, stops = awaited((0, "", False), (0, "", True))
    assert (result.status, result.cause, result.replaced, stops) == (0, "", (1,), [0, 0])


def test_the_first_cause_and_its_status_come_back() -> None:
    result, stops = awaited((0, "", False), (7, "rank 1: ValueError", False))
    assert (result.status, result.cause, stops) == (7, "rank 1: ValueError", [0, 0])


def test_others_do_not_wait_for_a_node_that_is_lost_for_good(capsys: pytest.CaptureFixture[str]) -> None:
    result, stops = awaited(RayError("The actor died.\nmore"), (75, "stopped", False))
    assert result.status == 1 and result.cause.endswith("cannot replace its actor: The actor died.")
    assert stops == [0, 1] and "node 0 is lost" in capsys.readouterr().err


def test_the_recipe_may_be_given_by_position_and_the_rest_by_name() -> None:
    assert RayJob(RECIPE, nodes=3) == RayJob(recipe=RECIPE, nodes=3)
    with pytest.raises(TypeError):
        RayJob(RECIPE, ["train.batch=8"])  # type: ignore[misc]


def test_others_do_not_wait_for_a_process_that_was_killed_for_good(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cause = "node 0: its paddle-dp was killed by SIGKILL"
    result, stops = awaited((-9, cause, True), (75, "stopped", False))
    assert (result.status, result.cause, result.replaced, stops) == (137, cause, (0,), [0, 1])
    assert cause in capsys.readouterr().err


def node_that_ends(
    monkeypatch: pytest.MonkeyPatch, statuses: Sequence[int], restarts: int
) -> tuple[RayNode, list[list[str]]]:
    """A node whose process ends with these statuses, one after the other, and the arguments of each."""
    monkeypatch.setitem(sys.modules, "ray", MagicMock())
    sys.modules["ray"].get_runtime_context().was_current_actor_reconstructed = False
    monkeypatch.setattr("os.chdir", lambda _: None)
    node, starts = RayNode(1, ".", {}, restarts), list[list[str]]()

    def process(arguments: list[str], lines: Any) -> int:
        starts.append(arguments)
        return statuses[len(starts) - 1]

    monkeypatch.setattr(node, "_process", process)
    return node, starts


def test_a_killed_process_starts_again_within_the_restarts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "r.yaml", "--nodes", "2", "--master", "a:1"]
    node, starts = node_that_ends(monkeypatch, [-9, -9, 0], 2)
    assert node.run(words, str(tmp_path)) == (0, "", True) and starts == [words] * 3
    assert "node 1: its paddle-dp was killed by SIGKILL, and is started again (restart 2 of 2)" in (
        capsys.readouterr().out
    )
    node, starts = node_that_ends(monkeypatch, [-9, -11], 1)
    cause = "node 1: its paddle-dp was killed by SIGSEGV"
    assert node.run(words, str(tmp_path)) == (-11, cause, True) and len(starts) == 2
    for number, sentence in ((9, "was killed by SIGKILL"), (15, "asked to stop while its paddle-dp started")):
        node, starts = node_that_ends(monkeypatch, [-number], 3)
        node.stop()
        status, cause, _ = node.run(words, str(tmp_path))
        assert status == 128 + number and sentence in cause and len(starts) == 1
    node, starts = node_that_ends(monkeypatch, [1], 3)
    assert node.run(words, str(tmp_path))[0] == 1 and len(starts) == 1  # a failure of its own


ALONE = ["train", "r.yaml", "--nodes", "1"]


def test_a_job_of_one_node_goes_on_from_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node, starts = node_that_ends(monkeypatch, [-9, 0, -9, 0], 3)
    node.run(ALONE, str(tmp_path))
    (tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    node.run(ALONE, str(tmp_path))
    assert [words[4:] for words in starts] == [[], [], [], ["--resume=newest"]]


@pytest.mark.parametrize("replaced", [True, False])
def test_a_job_of_one_node_goes_on_from_no_older_run(
    replaced: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An actor that Ray made again began at step 0, and a process that was killed early went on with an older run."""
    node, starts = node_that_ends(monkeypatch, [-9, 0] * 2, 3)
    sys.modules["ray"].get_runtime_context().was_current_actor_reconstructed = replaced
    (checkpoint := tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    written = checkpoint.stat().st_mtime
    node.run(ALONE, str(tmp_path), written)  # it was there before the job
    node.run(ALONE, str(tmp_path), written - 1)
    resumed = ["--resume=newest"]
    assert [words[4:] for words in starts] == [[], [], resumed if replaced else [], resumed]


def test_nodes_know_how_old_the_newest_checkpoint_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray := MagicMock())
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", MagicMock())
    ray.wait.side_effect = lambda waiting, timeout: (waiting[:1], waiting[1:])
    ray.get.return_value = (0, "", False)
    (checkpoint := tmp_path / "checkpoints" / "step-00000004").mkdir(parents=True)
    result = RayJob(recipe=RECIPE, nodes=1)._on(ray, None, tmp_path, Signals())
    actor = ray.remote().options().remote()
    assert result.status == 0 and actor.run.remote.call_args.args[2] == checkpoint.stat().st_mtime


@pytest.mark.processes
def test_a_process_that_ended_is_let_go() -> None:
    """An actor that Ray ends must not have it: the exception would come in the middle of its deletion."""
    node, lines = RayNode(0, ".", {"PYTHONPATH": str(ROOT)}), deque[str]()
    assert node._process(["no-such-verb"], lines) == 2
    assert node.process is None and any("no-such-verb" in line for line in lines)


@pytest.mark.parametrize("start", ["job", "trial"])
def test_an_actor_without_gpus_hides_them_from_its_process(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sets it to ""; without it the training took the cards of other jobs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started = MagicMock()
    monkeypatch.setattr("subprocess.Popen", started)
    started.return_value.__enter__.return_value.stdout = ()
    if start == "job":
        RayNode(0, ".", {"A": "b"})._process([], deque())
    else:
        TrialProcess(".", {"A": "b"}).run([], str(tmp_path / "screen"))
    variables = started.call_args.kwargs["env"]
    assert (variables["CUDA_VISIBLE_DEVICES"], variables["A"]) == ("", "b")


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


@pytest.mark.parametrize("room_after", [0, 20, 400])
def test_a_wait_for_room_is_told_soon(
    room_after: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = list[float]()
    monkeypatch.setattr(ray_job, "time", SimpleNamespace(monotonic=lambda: float(sum(waited))))
    group = SimpleNamespace(wait=lambda seconds: waited.append(seconds) or sum(waited) > room_after)
    job = RayJob(recipe=RECIPE, nodes=2)
    if room_after > job.wait:
        with pytest.raises(UsageError, match=r"has no room for 2 nodes .* after 300 s\. spread=False puts"):
            job._has_room(group, Signals())
    else:
        assert job._has_room(group, Signals())
    assert capsys.readouterr().err.count("waiting for room for 2 nodes") == (room_after > 0)


def test_the_home_folder_may_be_written_as_a_tilde(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named ~ was made."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setitem(sys.modules, "ray", MagicMock())
    monkeypatch.setitem(sys.modules, "ray.util", MagicMock())
    monkeypatch.setattr(
        ray_job, "read_recipe", lambda *words: SimpleNamespace(strategy=MagicMock(), callbacks=[])
    )
    monkeypatch.setattr(RayJob, "_on", lambda self, ray, group, folder, signals: folder)
    assert RayJob(recipe=RECIPE, output_dir="~/run").run() == Path("/home/me/run")


def test_a_signal_ends_the_wait_for_room_with_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own handler ended it deep in Ray's stack."""
    monkeypatch.setitem(sys.modules, "ray", MagicMock())
    monkeypatch.setitem(sys.modules, "ray.util", util := MagicMock())
    recipe = SimpleNamespace(strategy=MagicMock(), folder=Path("runs"), callbacks=[])
    monkeypatch.setattr(ray_job, "read_recipe", lambda *words: recipe)
    group = SimpleNamespace(wait=lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    util.placement_group.return_value = group
    result = RayJob(recipe=RECIPE, nodes=2).run()
    assert (result.status, result.replaced) == (143, ())
    assert (
        result.cause
        == "ended by SIGTERM while the job waited for room in the Ray cluster: nothing was trained."
    )
    assert result.cause in capsys.readouterr().err
    util.remove_placement_group.assert_called_once_with(group)


def test_a_signal_ends_the_wait_for_the_first_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", ray := MagicMock())
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", MagicMock())
    ray.wait.return_value = ([], [])
    result = RayJob(recipe=RECIPE, nodes=2)._on(ray, None, Path("run"), Signals(number=15, times=1))
    assert result.status == 143 and "waited for its first actor" in result.cause
    assert ray.kill.call_count == 2 and not ray.get.called


def test_a_first_actor_that_does_not_start_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an exception of Ray."""
    monkeypatch.setitem(sys.modules, "ray", ray := MagicMock())
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", MagicMock())
    ray.wait.return_value, ray.get.side_effect = ([], []), TimeoutError
    with pytest.raises(UsageError, match="The first actor has not started after 0 s: see `ray status`"):
        RayJob(recipe=RECIPE, nodes=2, wait=0.0)._on(ray, None, Path("run"), Signals())
    assert ray.kill.call_count == 2


def test_nodes_meet_below_the_ports_of_outgoing_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports up to 39999 were possible: Linux may give those from 32768 on to another program's connection."""
    monkeypatch.setitem(sys.modules, "ray", ray := MagicMock())
    ray.util.get_node_ip_address.return_value = "10.0.0.1"
    monkeypatch.setattr(ray_job, "free_port", lambda first: first)
    node = RayNode(0, ".", {})
    for pid in (9_999, 19_999, 4_194_303):
        monkeypatch.setattr("os.getpid", lambda pid=pid: pid)
        host, _, port = node.address().rpartition(":")
        assert host == "10.0.0.1" and 20_000 <= int(port) < 32_768


def test_a_batch_per_rank_counts_the_ranks_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", MagicMock())
    read = list[Sequence[str]]()
    monkeypatch.setattr(ray_job, "read_recipe", lambda path, settings: read.append(settings) or MagicMock())
    monkeypatch.setattr(ray_job, "connect", MagicMock(side_effect=RayError))  # it goes no further
    with pytest.raises(RayError):
        RayJob(RECIPE, settings=["train.batch=8 per rank"], nodes=3, ranks=2, output_dir="a").run()
    assert read == [["train.batch=8 per rank", "train.batch=48"]]


def test_checkpoints_in_memory_need_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", MagicMock())
    monkeypatch.setattr(ray_job, "connect", MagicMock(side_effect=RayError))  # it goes no further
    words = ["callbacks.1.use=memory_checkpoint"]
    with pytest.raises(UsageError, match=r"Give restarts=3, or leave it out"):
        RayJob(RECIPE, settings=words, nodes=1, restarts=0).run()
    with pytest.raises(RayError):
        RayJob(RECIPE, settings=words, nodes=1).run()


def test_numbers_are_checked() -> None:
    with pytest.raises(UsageError, match=r"RayJob\(nodes=0\): give 1 or more"):
        RayJob(recipe=RECIPE, nodes=0)
