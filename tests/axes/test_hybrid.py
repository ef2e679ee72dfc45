"""Hybrid layouts against one process: losses, gradient norms, weights, held-out numbers."""

import numpy as np
import pytest

from tests.parity import QUICK, SHORT, assert_same, train, train_each, truth
from tests.ranks import run_ranks

LAYOUTS = [
    (2, "{use: hybrid, tensor: 2}"),
    (2, "{use: hybrid, pipeline: 2}"),
    (4, "{use: hybrid, tensor: 2}"),
    (4, "{use: hybrid, tensor: 2, pipeline: 2}"),
]


# Biases of q, k and v, norms of their heads, and heads that are wider together than a token.
SWITCHED = "llama, bias: qkv, qk_norm: true, head_width: 10"


def test_switches_of_llama_are_one_process(tmp_path):
    """A norm of heads is whole on each tensor rank, which sees its own heads only: the gradients are summed."""
    axes = ("tensor: 2", "pipeline: 2", "tensor: 2, sequence_parallel: true")
    strategies = [f"{{use: hybrid, {each}}}" for each in axes]
    for many in zip(
        *run_ranks(train_each, 2, str(tmp_path), strategies, model=SWITCHED, **QUICK), strict=True
    ):
        assert_same(many, truth(model=SWITCHED, **QUICK))


def test_tensor_beside_data_is_one_process(tmp_path):
    """The others are in test_pipeline.py and, with their checkpoints, in test_sharding.py."""
    ranks, strategy = LAYOUTS[2]
    assert_same(run_ranks(train, ranks, str(tmp_path), strategy, **QUICK), truth(**QUICK))


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_a_layout_is_one_process(tmp_path, ranks, strategy):
    assert_same(run_ranks(train, ranks, str(tmp_path), strategy), truth())


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (2, "sharding: 2, sharding_stage: 3"),
        (2, "sequence: 2"),
        (4, "tensor: 2, data: 2"),
        (4, "tensor: 2, sharding: 2, sharding_stage: 2"),
        (4, "tensor: 2, sharding: 2, sharding_stage: 3, sequence_parallel: true"),
        (4, "tensor: 2, pipeline: 2, recompute: full"),
    ],
)
def test_switches_of_llama_are_one_process_in_every_layout(tmp_path, ranks, axes):
    many = run_ranks(train, ranks, str(tmp_path), f"{{use: hybrid, {axes}}}", SHORT, model=SWITCHED)
    assert_same(many, truth(SHORT, model=SWITCHED))


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "strategy"), [*LAYOUTS, (8, "{use: hybrid, tensor: 2, pipeline: 2}")])
def test_llama_in_the_same_layouts(tmp_path, ranks, strategy):
    many = run_ranks(train, ranks, str(tmp_path), strategy, "6 steps", model="llama")
    np.testing.assert_allclose(many[0]["rows"], truth("6 steps", model="llama")["rows"], rtol=1e-5)
