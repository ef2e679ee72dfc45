"""Weights that a training is to begin with: looked at before anything is moved or started."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from typer.testing import CliRunner

from paddle_dp import cli
from paddle_dp.assembly.build import build
from paddle_dp.assembly.first_forward import tried
from paddle_dp.checkpoint import Snapshot, TensorShard, save, set_best
from paddle_dp.errors import UsageError
from paddle_dp.launch.check_process import CheckProcess
from paddle_dp.launch.command import Job
from paddle_dp.launch.initial import check_load, check_weights
from paddle_dp.launch.start import run
from paddle_dp.mesh import Mesh
from paddle_dp.recipe import Load, read_recipe
from tests.house.recipes import small_recipe


def tensors(file: Path, *names: str) -> Path:
    """A safetensors file with tensors of one number."""
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(names)))
    return file


def having(shapes: dict[str, list[int]]) -> Any:
    """A model's part, as far as it is looked at: it has these parameters."""

    def build() -> paddle.nn.Layer:
        model = paddle.nn.Layer()
        for name, shape in shapes.items():
            *above, last = name.split(".")
            layer = model
            for word in above:
                if word not in layer._sub_layers:
                    layer.add_sublayer(word, paddle.nn.Layer())
                layer = layer._sub_layers[word]
            layer.add_parameter(last, layer.create_parameter(shape))
        return model

    return SimpleNamespace(build=build)


BODY = having({"body.w": [2]})


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 and 2, which is the best one."""
    folder = tmp_path / "old" / "checkpoints"
    for step in (1, 2):
        shards = {"w": TensorShard.full("model/body.w", np.zeros(2, "float32"))}
        save(Snapshot(tensors=shards, state={"progress": {"step": step}}), folder, Mesh.alone())
    set_best(folder, folder / "step-00000002", {"loss": 1.0})
    return folder.parent


def spoil(old: Path, *steps: int) -> None:
    for step in steps:
        (old / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")


@pytest.mark.parametrize("which", ["", "checkpoints", "best", "newest", "1", "checkpoints/step-00000001"])
def test_weights_that_can_be_opened_are_right(old: Path, which: str) -> None:
    check_weights(Load(path=str(old / which), only=("body", "*.w")), BODY)


def test_one_usable_checkpoint_of_a_run_is_enough(old: Path) -> None:
    spoil(old, 2)
    check_weights(Load(path=str(old)), BODY)
    check_weights(Load(path=str(old / "newest")), BODY)
    with pytest.raises(UsageError, match="step-00000002 cannot be used"):
        check_weights(Load(path=str(old / "best")), BODY)
    spoil(old, 1)
    with pytest.raises(UsageError, match=r"load\.path: The checkpoint .*step-00000002 cannot be used"):
        check_weights(Load(path=str(old)), BODY)


def test_only_headers_are_read(old: Path) -> None:
    """The ranks read the bytes; here a file that is too short is seen, and a wrong number is not."""
    file = old / "checkpoints/step-00000002/rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    check_weights(Load(path=str(old / "2")), BODY)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UsageError, match="wrongly"):
        check_weights(Load(path=str(old / "2")), BODY)


MISTAKES: dict[str, Callable[[Path], tuple[Path, str]]] = {
    "absent": lambda at: (
        at / "nope",
        r"load\.path: there is no .*nope\. Give a checkpoint, a run's folder",
    ),
    "no best": lambda at: (at / "nope/best", r"load\.path: There is no checkpoint in .*nope/checkpoints"),
    "no newest": lambda at: (
        at / "nope/newest",
        r"load\.path: .*nope/newest is neither a checkpoint nor a fo",
    ),
    "no step": lambda at: (at / "old/3", r"load\.path: There is no checkpoint of step 3 .* step 1, 2"),
    "an empty folder": lambda at: (at, r"load\.path: .* is neither a checkpoint nor a folder of checkpoints"),
    "a file of another kind": lambda at: (
        _text(at / "w.pdparams"),
        r"load\.path: .*w\.pdparams is not read: ",
    ),
    "no such file": lambda at: (at / "w.safetensors", r"load\.path: there is no file .*w\.safetensors\."),
    "no safetensors": lambda at: (
        _text(at / "w.safetensors"),
        r"load\.path: .*sense .is not a safetensors file",
    ),
    "no tensors": lambda at: (tensors(at / "w.safetensors"), r"load\.path: there are no weights in .*w\.saf"),
}


def _text(file: Path) -> Path:
    file.write_text("not tensors at all")
    return file


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_not_there_is_refused(tmp_path: Path, old: Path, mistake: str) -> None:
    path, said = MISTAKES[mistake](tmp_path)
    with pytest.raises(UsageError, match=said):
        check_weights(Load(path=str(path)), BODY)


def test_a_pattern_that_matches_nothing_there_is_refused(tmp_path: Path) -> None:
    file = tensors(tmp_path / "w.safetensors", "head.w", "backbone.0.w")
    part = having({"head.w": [1], "backbone.0.w": [1]})
    check_weights(Load(path=str(file), only=("backbone.*", "head")), part)
    with pytest.raises(
        UsageError, match=r"load\.only: 'bakbone\.\*' matches nothing in .*Did you mean 'backb"
    ):
        check_weights(Load(path=str(file), only=("head", "bakbone.*")), part)


def test_weights_in_the_folder_that_a_new_run_moves_aside_are_refused(tmp_path: Path) -> None:
    mine, more = tmp_path / "run", tmp_path / "more"
    mine.mkdir()
    recipe: Any = SimpleNamespace(
        folder=mine, load=Load(path=str(tensors(mine / "w.safetensors", "w"))), model=having({"w": [1]})
    )
    check_load(Job(recipe=more), recipe)  # no run is there yet
    (mine / "checkpoints").mkdir()
    check_load(Job(recipe=more, resume="newest"), recipe)
    with pytest.raises(UsageError, match=r"load\.path .* which a new run moves aside"):
        check_load(Job(recipe=more), recipe)
    check_load(Job(recipe=more), SimpleNamespace(folder=more, load=recipe.load, model=recipe.model))  # type: ignore[arg-type]


def test_a_resumed_training_and_other_jobs_need_no_weights(tmp_path: Path) -> None:
    recipe: Any = SimpleNamespace(folder=tmp_path, load=Load(path=str(tmp_path / "nope")))
    check_load(Job(recipe=tmp_path, resume="newest"), recipe)
    check_load(Job(recipe=tmp_path, entry_point="evaluate"), recipe)


def test_train_and_check_refuse_with_status_2_and_move_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckProcess, "__call__", lambda self, *said: tried(read_recipe(*said)))
    earlier, recipe = tmp_path / "run", tmp_path / "a.yaml"
    (earlier / "checkpoints").mkdir(parents=True)
    load = f"{{path: {tmp_path / 'nope'}}}"
    text = small_recipe("length: 1 epoch, batch: 8", optimizer="sgd", load=load, output_dir=str(earlier))
    recipe.write_text(text)
    nobody: Any = object()  # who would be asked to become the ranks
    assert run(Job(recipe=recipe, ranks=2), nobody) == 2
    assert f"load.path: there is no {tmp_path / 'nope'}" in capsys.readouterr().err.replace("\n", " ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.yaml", "run"]
    checked = CliRunner().invoke(cli.app, ["check", str(recipe)])
    assert checked.exit_code == 2
    assert f"load.path: there is no {tmp_path / 'nope'}" in checked.output
    file = tensors(tmp_path / "w.safetensors", "w")
    checked = CliRunner().invoke(cli.app, ["check", str(recipe), f"load.path={file}"])
    assert checked.exit_code == 2 and "w is only there; " in " ".join(checked.output.split())
    file = tensors(tmp_path / "w.safetensors", "a", "b")
    more = [f"load.path={file}", "load.rename={a: body.0.bias, b: head.bias}"]
    checked = CliRunner().invoke(cli.app, ["check", str(recipe), *more])
    assert "body.0.bias, there a, is [1] there and [" in " ".join(checked.output.split())
    own = tmp_path / "own"
    words = ["load=null", f"output_dir={own}", "train.length=1 step", "callbacks=[{use: checkpoint}]"]
    build(read_recipe(recipe, words), Mesh.alone()).fit()
    checked = CliRunner().invoke(cli.app, ["check", str(recipe), f"load.path={own}"])
    assert checked.exit_code == 0 and "mlp on digits" in checked.output
    assert f"weights from {own}" in checked.output.replace("\n", "") and "loaded" in checked.output
