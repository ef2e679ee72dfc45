"""A model cut by a table that names the wrong way is refused when it is placed; two ranks of a tensor axis."""

import numpy as np
import paddle
from paddle import nn

from paddle_dp.errors import UsageError
from tests.ranks import run_ranks

HERE = "tests/parallel/test_as_whole.py"


class Fused(nn.Layer):
    """Attention whose fused projection lies as [3, heads, size], or with whole heads beside each other."""

    attends = ("_attend",)

    def __init__(self, beside):
        super().__init__()
        self.cuts = {"qkv": "heads", "out": "rows"}
        self.beside, self.qkv, self.out = beside, nn.Linear(16, 48), nn.Linear(16, 16)

    def _attend(self, given):
        n, t, width = given.shape
        if self.beside:
            parts = given.reshape([n, t, width // 12, 3, 4]).unbind(3)
        else:
            parts = given.reshape([n, t, 3, width // 12, 4]).unbind(2)
        q, k, v = (part.transpose([0, 2, 1, 3]) for part in parts)
        weights = nn.functional.softmax(q @ k.transpose([0, 1, 3, 2]))
        return (weights @ v).transpose([0, 2, 1, 3]).reshape([n, t, width // 3])

    def forward(self, x):
        return self.out(self._attend(self.qkv(x)))


def place(cases):
    """What is said of each model, placed on a tensor axis; "" where it is."""
    from paddle_dp.mesh import join
    from paddle_dp.parallel import Task
    from paddle_dp.part import read_part

    mesh, said = join(seed=3), []
    for beside in cases:
        inputs = paddle.to_tensor(np.random.RandomState(0).randn(2, 6, 16).astype("float32"))
        task = Task(
            model=Fused(beside),
            loss=lambda outputs, targets: (outputs - targets).square(),
            optimizer=lambda rate, named: paddle.optimizer.SGD(0.1, parameters=[p for _, p in named]),
            samples=lambda inputs=inputs: inputs,
        )
        try:
            read_part("strategies", {"use": "hybrid", "tensor": 2}).build(mesh).place(task)
            said.append("")
        except UsageError as error:
            said.append(str(error))
    return said


def test_parts_of_a_fused_projection_are_no_heads():
    """Such a run trained another model, and said that it was one process's."""
    for good, bad in run_ranks(f"{HERE}:place", 2, [True, False]):
        assert good == ""
        assert bad.startswith("strategy.tensor: cut as `cuts` and `attends` say, Fused is another model")
