"""Hybrid layouts against one process: losses, gradient norms, weights, held-out numbers."""

import numpy as np
import pytest

from tests.parity import SHORT, assert_same, train, truth
from tests.ranks import run_ranks

LAYOUTS = [
    (2, "{use: hybrid, tensor: 2}"),
    (2, "{use: hybrid, pipeline: 2}"),
    (4, "{use: hybrid, tensor: 2}"),
    (4, "{use: hybrid, tensor: 2, pipeline: 2}"),
]


def test_tensor_beside_data_is_one_process(tmp_path):
    """The others are in test_pipeline.py and, with their checkpoints, in test_sharding.py."""
    ranks, strategy = LAYOUTS[2]
    assert_same(run_ranks(train, ranks, str(tmp_path), strategy, SHORT), truth(SHORT))


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_a_layout_is_one_process(tmp_path, ranks, strategy):
    assert_same(run_ranks(train, ranks, str(tmp_path), strategy), truth())


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "strategy"), [*LAYOUTS, (8, "{use: hybrid, tensor: 2, pipeline: 2}")])
def test_llama_in_the_same_layouts(tmp_path, ranks, strategy):
    many = run_ranks(train, ranks, str(tmp_path), strategy, "6 steps", model="llama")
    np.testing.assert_allclose(many[0]["rows"], truth("6 steps", model="llama")["rows"], rtol=1e-5)
