"""The installed package in an empty folder: README's commands, where there is no clone. pip needs the network once."""

import re
import shutil

import numpy as np
import pytest

from tests.house.programs import ROOT, run_python

SOURCES = (
    "MANIFEST.in", "paddle_dp", "models", "configs", "setup.py", "pyproject.toml", "README.md", "LICENSE",
)  # fmt: skip
OWN = """
import paddle.distributed as dist

dist.init_parallel_env()
print("rank", dist.get_rank(), "of", dist.get_world_size())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The environment in which the wheel's package is imported, and nothing of the clone."""
    source, there = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    pip = ["-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["wheel", "--no-deps", "--wheel-dir", str(there), str(source)]
    run_python(*pip, *build, timeout=300)
    [wheel] = there.glob("*.whl")
    run_python(*pip, "install", "--no-deps", "--target", there / "site", wheel, timeout=300)
    return {"PYTHONPATH": str(there / "site"), "OMP_NUM_THREADS": "1", "COLUMNS": "120"}


@pytest.mark.processes
def test_a_model_that_is_a_folder_is_built_in(tmp_path):
    models = {"models/__init__.py", "models/net/__init__.py", "models/net/layers.py"}
    for file in ("paddle_dp/__init__.py", "configs/net.yaml", *models):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / "setup.cfg").write_text("[options]\npackages = paddle_dp\n")
    shutil.copy(ROOT / "setup.py", tmp_path)
    run_python("setup.py", "-q", "build_py", "--build-lib", "built", folder=tmp_path)
    shipped = tmp_path / "built/paddle_dp/shipped"
    assert {str(file.relative_to(shipped)) for file in shipped.rglob("*.*")} == {*models, "configs/net.yaml"}


@pytest.mark.long
def test_commands_in_an_empty_folder(installed, tmp_path):
    def run(*words):
        return run_python("-m", "paddle_dp", *words, folder=tmp_path, env=installed, timeout=240).stdout

    code = "import paddle_dp; print(paddle_dp.__file__)"
    where = run_python("-c", code, folder=tmp_path, env=installed)
    assert where.stdout.startswith(installed["PYTHONPATH"])

    assert "none yet that this is one process's result: paddle-dp verify" in run(
        "train", "configs/digits_mlp.yaml", "--ranks", "2", "train.length=3 epochs"
    )
    page = (tmp_path / "runs" / "digits_mlp" / "report.html").read_text()
    assert "prefers-color-scheme" in page  # its style is in the wheel
    accuracy = re.compile(r"acc1 ([\d.]+)")
    before = accuracy.search(run("evaluate", "runs/digits_mlp", "--ranks", "2"))[1]
    np.save(tmp_path / "some.npy", np.zeros((2, 64), "float32"))
    assert len(run("predict", "runs/digits_mlp", "some.npy").splitlines()) == 2
    run("export", "runs/digits_mlp")
    assert (tmp_path / "runs" / "digits_mlp" / "export" / "export.json").exists()
    (tmp_path / "runs" / "digits_mlp").rename(tmp_path / "moved")
    assert accuracy.search(run("evaluate", "moved"))[1] == before
    assert accuracy.search(run("evaluate", "moved", "--checkpoint", "best"))
    (tmp_path / "own.py").write_text(OWN)
    assert "rank 0 of 2" in run("launch", "--ranks", "2", "own.py")
    run("new", "mine", "--recipe", "gpt_tiny")
    assert (tmp_path / "mine" / "models" / "gpt.py").exists()
    run("check", "mine/configs/gpt_tiny.yaml")
