"""TensorBoard's log: the numbers, tags and steps of VisualDL's, whole events, and a resume without doubled steps."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddle_dp.callbacks import dashboard, tensorboard
from paddle_dp.errors import InstallError
from paddle_dp.part import read_part
from paddle_dp.recipe import read_recipe
from paddle_dp.train import Callback, Refusal, Run
from tests.callbacks.moments import At, Found
from tests.callbacks.test_dashboard import NUMBERS, dp_rank

pytest.importorskip("tensorboardX")


def events(run: Run) -> Iterator[Any]:
    """The events of the only file, read as the format is described; raises for half an event."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (run.folder / "tensorboard").iterdir()
    log, position = path.read_bytes(), 0
    while position < len(log):
        (length,) = struct.unpack_from("<Q", log, position)
        body = log[position + 12 : position + 12 + length]
        assert len(body) == length and len(log) >= position + 16 + length
        yield Event.FromString(body)
        position += 16 + length


def points(run: Run) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events(run):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                curves.setdefault(value.tag, []).append((event.step, value.simple_value))
    return curves


def started(run: Run, at: At, step: int, module: Any = tensorboard, **config: Any) -> Callback:
    callback: Callback = module.Config(**config).build(run)
    callback.start(at("start", step))
    return callback


def test_the_log_has_the_numbers_tags_and_steps_of_visualdl(run: Run, at: At, found: Found) -> None:
    for module in (tensorboard, dashboard):
        callback = started(run, at, 0, module, images=1)
        for step in (10, 20):
            callback.step(at("step", step, **NUMBERS, **{"50% share": 0.5}))
        callback.evaluated(at("evaluated", 20), found(acc1=0.875))
        callback.saved(at("saved", 20, seconds_writing=0.5), run.folder)
        callback.end(at("end", 20))
    theirs = dp_rank(run)
    assert points(run) == {
        tag: [(point.id, pytest.approx(point.value)) for point in theirs.get_data("scalar", tag)]
        for tag in theirs.get_tags()["scalar"]
    }
    pictures = {v.tag: v.image for event in events(run) for v in event.summary.value if v.HasField("image")}
    assert {*pictures} == {*theirs.get_tags()["image"]} and pictures["evaluation/confusion"].width > 100


def test_a_resumed_run_goes_on_without_doubled_steps(run: Run, at: At, found: Found) -> None:
    first = started(run, at, 0, histograms=False)
    for step in range(1, 8):
        first.step(at("step", step, loss=float(step)))
        first.evaluated(at("evaluated", step), found(loss=float(step)))
    (path,) = (run.folder / "tensorboard").iterdir()
    log = path.read_bytes()
    assert len(tensorboard.cut(log, 4)[0]) == len(log)  # a TensorBoard that is open goes on at its byte
    second = started(run, at, 4)
    second.evaluated(at("evaluated", 4), found(loss=4.0))  # told again at the step of a resume
    for step in range(5, 10):
        second.step(at("step", step, loss=10.0 * step))
    losses = [(step, float(step) if step < 5 else 10.0 * step) for step in range(1, 10)]
    assert points(run)["train/loss"] == losses
    assert [step for step, _ in points(run)["evaluation/loss"]] == [1, 2, 3, 4]
    assert [event.step for event in events(run) if event.session_log.status == 1] == [5]


def test_half_an_event_at_the_end_is_dropped_and_damage_ends_the_log(run: Run, at: At) -> None:
    first = started(run, at, 0)
    for step in range(1, 5):
        first.step(at("step", step, loss=float(step)))
    (path,) = (run.folder / "tensorboard").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    second = started(run, at, 4)
    second.step(at("step", 5, loss=5.0))
    assert [step for step, _ in points(run)["train/loss"]] == [1, 2, 3, 5]
    path.write_bytes(whole[:200].replace(b"\x00", b"\x01", 1) + whole[200:])
    started(run, at, 4).step(at("step", 6, loss=6.0))
    assert points(run)["train/loss"][-1] == (6, 6.0)


def test_going_back_to_a_checkpoint_removes_the_steps_after_it(run: Run, at: At) -> None:
    refusal = Refusal(step=7, action="rewind", why="nan", epoch=0, batch=3, samples=16)
    callback = started(run, at, 0)
    for step in range(1, 7):
        callback.step(at("step", step, loss=float(step)))
    callback.refused(at("refused", 2), refusal)
    callback.step(at("step", 3, loss=30.0))
    assert points(run)["train/loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_blank_event_of_any_size_shows_nothing() -> None:
    from tensorboardX.proto.event_pb2 import Event

    for size in range(2, 20_000):
        body = tensorboard.blank(size)
        assert len(body) == size
        assert size % 97 or not Event.FromString(body).summary.value


def test_settings_pictures_and_histograms_are_read_by_tensorboards_protocol(run: Run, at: At) -> None:
    log = tensorboard.EventLog(run.folder / "tensorboard", 0)
    log.settings({"model/width": 64, "name": "x", "fast": "yes"}, ["evaluation/acc1"])
    log.histogram("weights/w", [1, 3], [0.0, 1.0, 2.0], 4)
    log.text("recipe", "a: 1\nb: 2", 0)
    values = {value.tag: value for event in events(run) for value in event.summary.value}
    assert values["weights/w"].histo.num == 4 and values["weights/w"].histo.sum == 5.0
    assert values["_hparams_/experiment"].metadata.plugin_data.plugin_name == "hparams"
    assert b"    b: 2" in values["recipe/text_summary"].tensor.string_val[0]


def test_without_tensorboardx_it_is_refused_at_the_door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    component = read_part("callbacks", {"use": "tensorboard"})
    with pytest.raises(InstallError, match=r"pip install 'paddle_dp\[tensorboard\]'"):
        component.refuse(read_recipe("configs/digits_mlp.yaml"), 1, "cpu")


def test_a_recipe_is_read_without_importing_tensorboardx() -> None:
    code = "import sys; from paddle_dp.part import read_part; read_part('callbacks', {'use': 'tensorboard'})"
    code += "; import json; print(json.dumps([m for m in sys.modules if m == 'tensorboardX']))"
    assert (
        json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) == []
    )
