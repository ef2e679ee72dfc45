"""A proof reads a stream's first samples in their order, as training does."""

import numpy as np
import pytest

from paddle_dp.mesh import Mesh
from paddle_dp.proof.trace import first_samples
from paddle_dp.recipe import read_recipe

RECIPE = """
model: {use: mlp, inputs: 2, hidden: [4], classes: 2}
dataset: {use: stream_for_a_proof.Numbers}
loss: {use: cross_entropy}
optimizer: {use: adamw}
schedule: {use: constant, learning_rate: 0.1}
strategy: {use: data_parallel}
train: {length: 2 epochs, batch: 4}
"""


class Numbers:
    def __init__(self, split: str):
        self.split = split

    def __iter__(self):
        for i in range(21):
            yield np.full(2, i, "float32"), i % 2


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    import sys
    from types import ModuleType

    module = ModuleType("stream_for_a_proof")
    module.Numbers = Numbers
    monkeypatch.setitem(sys.modules, "stream_for_a_proof", module)
    (tmp_path / "r.yaml").write_text(RECIPE)
    return read_recipe(tmp_path / "r.yaml")


def test_the_first_batches_are_the_streams(recipe):
    chosen = first_samples(recipe, steps=3, ranks=2, mesh=Mesh.alone())
    inputs = [float(chosen[i][0][0]) for i in range(len(chosen))]
    assert inputs == list(map(float, range(len(chosen))))
    assert 2 * 4 < len(chosen) < 3 * 4  # the last batch has unequal shares
