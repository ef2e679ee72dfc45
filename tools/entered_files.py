"""Counts the files and functions of the package that one step, or reading a recipe, enters.

A script that stands alone: house.py writes it into an older tree, and runs it there with that tree's package.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RECIPE = """
model: {use: mlp, inputs: 64, hidden: [8], classes: 4}
dataset: {use: random_images, shape: [1, 8, 8], classes: 4, samples: 64, test_samples: 8}
loss: {use: cross_entropy}
optimizer: {use: sgd, clip: 1.0}
schedule: {use: constant, learning_rate: 0.1}
strategy: {use: data_parallel}
train: {length: 8 steps, batch: 8, seed: 1}
callbacks: []
"""


Functions = dict[str, list[str]]  # by file


class Entered:
    """Collects the package's functions that this thread enters, but for those that an import runs."""

    def __init__(self) -> None:
        self._codes: dict[CodeType, bool] = {}
        self._package = str(Path(sys.modules["paddle_dp"].__file__ or "").parent) + "/"

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        counts = event == "call" and code.co_flags & CO_OPTIMIZED and not self._codes.get(code)
        if counts and code.co_filename.startswith(self._package):
            self._codes[code] = not _is_importing(frame)

    @property
    def functions(self) -> Functions:
        """The functions by file, in the order of their first call; without comprehensions and lambdas."""
        result: Functions = {}
        for code in [code for code, counts in self._codes.items() if counts]:
            names = result.setdefault(code.co_filename.removeprefix(self._package), [])
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
            if "<" not in name.rpartition(".")[2]:
                names.append(name.replace(".<locals>", ""))
        return result


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def step_functions(folder: str) -> Functions:
    """Runs in each of two ranks. Returns the functions entered between the callbacks of two successive steps."""
    from paddle_dp.assembly.build import build
    from paddle_dp.mesh import join
    from paddle_dp.recipe import read_recipe
    from paddle_dp.train import Callback

    path = Path(folder) / "recipe.yaml"
    path.write_text(RECIPE)
    trainer = build(read_recipe(path, [f"output_dir={folder}"]), join(seed=1))
    entered = Entered()

    class Span(Callback):
        """Begins behind step 5, when all that only the first steps do is done."""

        def step(self, moment: Any) -> None:
            steps.append(1)
            sys.setprofile(entered if len(steps) == 5 else None)

    steps: list[int] = []
    trainer.add(Span())
    trainer.fit("8 steps")
    return entered.functions


def recipe_functions(recipe: str) -> None:
    """Prints the functions that `paddle-dp train RECIPE` enters until `read_recipe` has returned, and ends."""
    from paddle_dp.cli import main

    entered = Entered()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        entered(frame, event, argument)
        if event == "return" and frame.f_code.co_name == "read_recipe" and argument is not None:
            sys.setprofile(None)
            print(json.dumps(entered.functions), flush=True)
            os._exit(0)  # no rank is started: the rest is the launcher's

    sys.argv = ["paddle-dp", "train", recipe]
    sys.setprofile(profile)
    main()


def entered_functions(root: Path, kind: str) -> Functions:
    """Runs a step or reads a recipe (`kind`) with the package of a tree: the functions that it enters, by file."""
    script = root / "tools" / "entered_files.py"
    if not script.exists() or not script.samefile(__file__):
        script.parent.mkdir(exist_ok=True)
        script.write_text(Path(__file__).read_text())
    run = subprocess.run(
        [sys.executable, str(script), kind], cwd=root, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"{root}: the files of one {kind} could not be counted:\n{run.stderr[-3000:]}")
    functions: Functions = json.loads(run.stdout.splitlines()[-1])
    return functions


def enter(kind: str) -> None:
    """Prints the functions entered by one step or by reading a recipe, with the tree in which this script lies."""
    import paddle_dp

    assert str(ROOT) in str(paddle_dp.__file__), f"{paddle_dp.__file__} is not of {ROOT}"
    with tempfile.TemporaryDirectory(prefix="house-") as folder:
        if kind == "recipe":
            path = Path(folder) / "recipe.yaml"
            path.write_text(RECIPE)
            recipe_functions(str(path))
        else:
            import tools.entered_files
            from tests.ranks import run_ranks

            first, *others = run_ranks(tools.entered_files.step_functions, 2, folder)
            for file, names in (pair for functions in others for pair in functions.items()):
                first[file] = list(dict.fromkeys([*first.get(file, []), *names]))
            print(json.dumps(first))


if __name__ == "__main__":
    enter(sys.argv[1])
