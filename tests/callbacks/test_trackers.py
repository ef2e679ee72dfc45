"""Trackers: VisualDL's numbers, tags and steps, one run after a resume; no failure ends or changes a training."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import sys
from collections.abc import Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich.style  # noqa: F401 - its import draws a random number

from paddle_dp.callbacks import _tracker, dashboard, swanlab, trackio
from paddle_dp.errors import InstallError
from paddle_dp.part import read_part
from paddle_dp.recipe import read_recipe
from paddle_dp.train import Callback, Refusal, Run
from tests.callbacks.moments import At, Capture, Found
from tests.callbacks.test_dashboard import NUMBERS, dp_rank

needs_trackio = pytest.mark.skipif(not find_spec("trackio"), reason="trackio is not installed")
needs_swanlab = pytest.mark.skipif(not find_spec("swanlab"), reason="swanlab is not installed")
Entries = list[tuple[str, int, Any]]


class FakeRun:
    """Notes entries; `fails` names the method that raises."""

    def __init__(self, fails: str = "", written: frozenset[str] = frozenset()):
        self.fails, self.written = fails, written
        self.entries: Entries = []
        self.finished: list[str] = []

    def _act(self, method: str) -> None:
        random.random(), np.random.rand()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("welcome")
        if self.fails == method:
            raise ConnectionError("no network")

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._act("log")
        self.entries += [(tag, step, value) for tag, value in values.items()]

    def text(self, text: str) -> Any:
        return ("text", text)

    def picture(self, png: bytes) -> Any:
        self._act("picture")
        return ("picture", png[1:4])

    def histogram(self, counts: Any, edges: Any) -> Any:
        return ("histogram", len(counts))

    def finish(self, failure: BaseException | None) -> None:
        self._act("finish")
        self.finished.append(str(failure or ""))


class FakeTracker(_tracker.Tracker):
    name = "fake"

    def __init__(self, run: Run, config: dashboard.Config, *runs: FakeRun):
        super().__init__(run, config)
        self.waiting, self.begun = list(runs), list[int]()

    def begin_run(self, step: int, settings: Mapping[str, int | float | str]) -> FakeRun:
        self.begun.append(step)
        fake = self.waiting.pop(0)
        fake._act("begin")
        return fake


def walk(callback: Callback, run: Run, at: At, found: Found) -> None:
    callback.start(at("start", 0))
    for step in (10, 20):
        callback.step(at("step", step, **NUMBERS, **{"50% share": 0.5}))
    callback.evaluated(at("evaluated", 20), found(acc1=0.875))
    callback.saved(at("saved", 20, seconds_writing=0.5), run.folder)
    callback.end(at("end", 20))


def visualdls(run: Run, at: At, found: Found) -> tuple[dict[str, list[tuple[int, Any]]], set[str]]:
    """VisualDL's points and pictures of the same walk."""
    walk(dashboard.Config(images=1).build(run), run, at, found)
    log = dp_rank(run)
    tags = log.get_tags()
    points = {
        tag: [(p.id, pytest.approx(p.value)) for p in log.get_data("scalar", tag)] for tag in tags["scalar"]
    }
    return points, set(tags["image"])


def by_tag(entries: Entries) -> dict[str, list[tuple[int, Any]]]:
    curves: dict[str, list[tuple[int, Any]]] = {}
    for tag, step, value in entries:
        curves.setdefault(tag.replace("%", "_"), []).append((step, value))
    return curves


def test_the_walk_gives_trackers_the_numbers_tags_and_steps_of_visualdl(
    run: Run, at: At, found: Found, capsys: Capture
) -> None:
    random.seed(3), np.random.seed(3)
    before = random.getstate(), np.random.get_state()[1].tolist(), signal.getsignal(signal.SIGINT)
    fake = FakeRun()
    walk(FakeTracker(run, dashboard.Config(images=1), fake), run, at, found)
    assert (random.getstate(), np.random.get_state()[1].tolist(), signal.getsignal(signal.SIGINT)) == before
    points, pictures = visualdls(run, at, found)
    curves = by_tag(fake.entries)
    assert {tag: curve for tag, curve in curves.items() if isinstance(curve[0][1], float)} == points
    assert {tag for tag, curve in curves.items() if curve[0][1] == ("picture", b"PNG")} == pictures
    assert fake.finished == [""]
    shown = capsys.readouterr()
    assert (
        shown.out == "" and shown.err == "The tracker fake complains: welcome\n"
    )  # once, and not of `begin`


@pytest.mark.parametrize("method", ["begin", "log", "picture", "finish"])
def test_a_tracker_that_fails_is_a_sentence_and_ends_only_itself(
    run: Run, at: At, found: Found, capsys: Capture, method: str
) -> None:
    fake = FakeRun(method)
    walk(FakeTracker(run, dashboard.Config(images=1), fake), run, at, found)
    sentences = [line for line in capsys.readouterr().err.splitlines() if "failed" in line]
    assert sentences == ["The tracker fake failed: no network. The training goes on without it."]
    assert bool(fake.entries) == (method == "finish") and not fake.finished


def test_going_back_ends_the_session_and_begins_one_after_that_step(run: Run, at: At) -> None:
    first, second = FakeRun(), FakeRun(written=frozenset(["evaluation/loss", "mesh"]))
    tracker = FakeTracker(run, dashboard.Config(), first, second)
    tracker.start(at("start", 0))
    tracker.step(at("step", 3, loss=3.0))
    tracker.refused(
        at("refused", 2), Refusal(step=3, action="rewind", why="nan", epoch=0, batch=3, samples=16)
    )
    tracker.log.scalars({"evaluation/loss": 1.0, "new": 2.0}, 2)  # the first is there already
    tracker.failed(at("failed", 3), ValueError("an accident"))
    assert tracker.begun == [0, 2] and first.finished == [""] and second.finished == ["an accident"]
    assert second.entries == [("new", 2, 2.0), ("guard/refused", 3, 1.0)][::-1]


@pytest.mark.parametrize("module", [trackio, swanlab])
def test_without_the_package_it_is_refused_at_the_door(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tracker, "find_spec", lambda name: None)
    name = module.__name__.rpartition(".")[2]
    component = read_part("callbacks", {"use": name})
    with pytest.raises(InstallError, match=rf"pip install 'paddle_dp\[{name}\]'"):
        component.refuse(read_recipe("configs/digits_mlp.yaml"), 1, "cpu")


def test_swanlab_has_no_histograms() -> None:
    with pytest.raises(ValueError, match="SwanLab has none"):
        swanlab.Config(histograms=True)


@pytest.fixture
def only_local(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A home without settings of trackers, with addresses of theirs in the environment, and no way to the network."""
    for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", "SWANLAB_WEBHOOK"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9/refused")
    monkeypatch.setenv("HF_TOKEN", "hf_not_a_token")
    monkeypatch.setenv("SWANLAB_MODE", "online")
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home"))

    def refuse(event: str, arguments: Any) -> None:
        if _armed and event in ("socket.connect", "socket.getaddrinfo"):
            _armed.append((event, str(arguments)))

    _armed[:] = ["armed"]
    if not _hooked:
        sys.addaudithook(refuse)
        _hooked.append(True)
    yield
    reached, _armed[:] = _armed[1:], []
    assert not reached


_armed: list[Any] = []
_hooked: list[bool] = []


@pytest.fixture
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trackio's folder is chosen when it is imported."""
    if "trackio" not in sys.modules:
        os.environ["TRACKIO_DIR"] = str(tmp_path_factory.mktemp("trackio"))
    return Path(os.environ["TRACKIO_DIR"])


def of_trackio(database: Path, project: str, run: Run) -> Entries:
    name = (run.folder / "trackio.txt").read_text().strip()
    with closing(sqlite3.connect(database / f"{project}.db")) as connection:
        assert connection.execute("SELECT DISTINCT run_name FROM metrics").fetchall() == [(name,)]
        return [
            (tag, step, value)
            for tag, step, value in connection.execute(
                "SELECT key, step, value FROM metrics, json_each(CAST(metrics AS TEXT)) ORDER BY metrics.id"
            )
        ]


@needs_trackio
@pytest.mark.usefixtures("only_local")
def test_trackio_has_them_in_its_local_database(
    run: Run, at: At, found: Found, database: Path, capsys: Capture
) -> None:
    walk(trackio.Config(images=1, project="walk").build(run), run, at, found)
    points, pictures = visualdls(run, at, found)
    curves = by_tag(of_trackio(database, "walk", run))
    assert {tag: curve for tag, curve in curves.items() if isinstance(curve[0][1], float)} == points
    assert {tag for tag, curve in curves.items() if "trackio.image" in str(curve[0][1])} == pictures
    assert capsys.readouterr() == ("", "")


def resumed(module: Any, run: Run, at: At, found: Found, **config: Any) -> None:
    """A training to step 7, and one that goes on from step 4 with other numbers."""
    first = module.Config(every="1 step", **config).build(run)
    first.start(at("start", 0))
    for step in range(1, 8):
        first.step(at("step", step, loss=float(step)))
        first.evaluated(at("evaluated", step), found(loss=float(step)))
    first.failed(at("failed", 7), ValueError("an accident"))
    second = module.Config(every="1 step", **config).build(run)
    second.start(at("start", 4))
    second.evaluated(at("evaluated", 4), found(loss=4.0))  # told again at the step of a resume
    for step in range(5, 10):
        second.step(at("step", step, loss=10.0 * step))
    second.end(at("end", 9))


LOSSES = [(step, float(step) if step < 5 else 10.0 * step) for step in range(1, 10)]


@needs_trackio
@pytest.mark.usefixtures("only_local")
def test_trackio_goes_on_in_the_same_run_without_doubled_steps(
    run: Run, at: At, found: Found, database: Path
) -> None:
    resumed(trackio, run, at, found, project="resumed")
    curves = by_tag(of_trackio(database, "resumed", run))
    assert curves["train/loss"] == LOSSES
    assert [step for step, _ in curves["evaluation/loss"]] == [1, 2, 3, 4]


def of_swanlab(run: Run) -> tuple[Entries, set[str]]:
    """The entries of all sessions, and their ids."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    entries: Entries = []
    ids = set[str]()
    for file in sorted((run.folder / "swanlab").glob("run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        while data := reader.scan():
            record = Record.FromString(data)
            if record.HasField("start"):
                ids.add(record.start.id)
            if record.HasField("scalar"):
                entries.append((record.scalar.key, record.scalar.step, record.scalar.value.number))
            if record.HasField("media"):
                names = [item.filename for item in record.media.value.items]
                entries.append((record.media.key, record.media.step, names))
        reader.close()
    return entries, ids


@needs_swanlab
@pytest.mark.usefixtures("only_local")
def test_swanlab_has_them_in_files_of_the_run(run: Run, at: At, found: Found, capsys: Capture) -> None:
    handlers = signal.getsignal(signal.SIGINT), sys.excepthook
    walk(swanlab.Config(images=1).build(run), run, at, found)
    assert (signal.getsignal(signal.SIGINT), sys.excepthook) == handlers
    points, pictures = visualdls(run, at, found)
    curves = by_tag(of_swanlab(run)[0])
    assert {tag: curve for tag, curve in curves.items() if isinstance(curve[0][1], float)} == points
    assert {tag for tag, curve in curves.items() if str(curve[0][1]).endswith(".png']")} == pictures
    assert capsys.readouterr() == ("", "")


@needs_swanlab
@pytest.mark.usefixtures("only_local")
def test_swanlab_goes_on_in_the_same_run_without_doubled_steps(run: Run, at: At, found: Found) -> None:
    resumed(swanlab, run, at, found)
    entries, ids = of_swanlab(run)
    assert by_tag(entries)["train/loss"] == LOSSES and len(ids) == 1
    assert [step for step, _ in by_tag(entries)["evaluation/loss"]] == [1, 2, 3, 4]
