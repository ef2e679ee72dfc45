"""The modules outside the package that a recipe would import, named without importing one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paddle_dp.recipe import foreign_code, read_recipe
from paddle_dp.recipe.check import check_all

RECIPE = """\
model: {use: net, blocks: ["a.*", [{use: flat.squeeze}, fc]]}
dataset: {use: sets.more.Texts}
loss: {use: paddle.nn.CrossEntropyLoss}
optimizer: {use: sgd}
train: {length: 3 epochs, batch: 32}
callbacks: [{use: metrics}, {use: gone.Callback}, {use: paddle_dp.callbacks.console}, {use: os.system}]
"""


@pytest.fixture(autouse=True)
def _explosive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("models/net.py", "flat.py", "sets/__init__.py", "sets/more.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise RuntimeError('imported')")
    monkeypatch.chdir(tmp_path)


def test_each_is_named_by_its_file_and_none_is_imported(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RECIPE)
    said = foreign_code("run.yaml", ["callbacks.1.use=later.Callback"])
    assert said == ["models/net.py", "flat.py", "sets/more.py", "later.Callback"]
    assert not {"flat", "sets", "models.net"} & set(sys.modules)


def test_a_recipe_of_our_own_parts_and_paddles_imports_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {use: paddle.vision.models.resnet18}\ndataset: {use: digits}\n"
    )
    assert foreign_code("run.yaml") == []


MODEL = """
from pathlib import Path

def build(width: int = 2):
    Path("called").touch()
    raise AssertionError("called")
"""


def test_check_imports_and_calls_nothing(
    write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calls.py").write_text(MODEL)
    recipe = write(
        "model: {use: calls.build, cuts: {fc: colwise}}\ndataset: {use: digits}\noptimizer: {use: sgd}\n"
        "loss: {use: cross_entropy}\ntrain: {length: 1 epoch, batch: 8}\n"
    )
    assert check_all([recipe]) == 0
    out = capsys.readouterr().out.splitlines()[1:]
    assert out == [
        "  imported: calls.py",
        "  not compared with the model's layers: model.cuts (--ranks N builds it)",
    ]
    assert not (tmp_path / "called").exists()
    read_recipe(recipe)  # what trains it tries it first
    assert (tmp_path / "called").exists()
    del sys.modules["calls"]


@pytest.mark.processes  # Paddle's launcher, which nobody will need
def test_a_run_of_somebody_else_says_first_what_it_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from paddle_dp.launch.command import Job
    from paddle_dp.launch.start import run

    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for entry_point, says in (("evaluate", True), ("export", True), ("generate", True), ("train", False)):
        assert run(Job(recipe=Path("recipe.yaml"), entry_point=entry_point, ranks=2)) == 2
        first = capsys.readouterr().err.splitlines()[0]
        said = "recipe.yaml imports, and so runs, code that is not paddle_dp's: models/net.py, flat.py, sets/more.py"
        assert (first == f"{said}, gone.Callback") is says
