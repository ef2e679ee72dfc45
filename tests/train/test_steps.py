"""What a step costs in the package itself."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from paddle import nn

import paddle_dp
from paddle_dp.assembly.trainer import Trainer
from paddle_dp.data import Loader
from paddle_dp.learner import full_model_learner
from paddle_dp.mesh import Mesh
from paddle_dp.train import Callback
from tests.house.datasets import Arrays
from tests.house.learners import task_of

PACKAGE = str(Path(paddle_dp.__file__).parent)
STEP_CALLS = 122  # of the package's functions, in a step of one process; a commit that raises it says why


class InMemory(Arrays):
    """Is read many samples at once."""

    def take(self, indices: Any) -> Any:
        return self.inputs[indices], self.targets[indices]


class CountsCalls(Callback):
    """Counts the calls of the package's functions between two steps, after the measured ones."""

    reads = weights = False

    def __init__(self) -> None:
        self.calls: list[str] = []

    def step(self, moment: Any) -> None:
        sys.setprofile(self._note if moment.progress.step == 35 else None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Comprehensions are calls up to Python 3.11 only.
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            self.calls.append(f"{Path(code.co_filename).name}:{code.co_name}")


def test_a_step_of_one_process_has_few_calls_of_the_package() -> None:
    counter, mesh = CountsCalls(), Mesh.alone()
    data = InMemory(np.ones([160, 3], "float32"), np.zeros([160], "int64"))
    learner = full_model_learner(task_of(nn.Linear(3, 2)), mesh)
    Trainer(learner, Loader.plain(data, 4, mesh), [counter]).fit("40 steps")
    assert 0 < len(counter.calls) <= STEP_CALLS, sorted(counter.calls)
