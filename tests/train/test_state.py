"""The state of an optimizer in a checkpoint is placed by one rule, whether it is saved or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from paddle_dp.batch import Batch, MicroBatch
from paddle_dp.checkpoint import optimizer_tensors
from paddle_dp.core.placement import Shard
from paddle_dp.errors import CheckpointError
from paddle_dp.learner import full_model_learner
from paddle_dp.mesh import Mesh
from paddle_dp.train import state
from tests.house.learners import task_of


def trained(frozen: str = "") -> Any:
    """A learner after an update by AdamW, which keeps two moments of a weight's shape and two counts; `frozen`: the
    parameter that it does not train."""
    model = nn.Linear(4, 2)
    for name, parameter in model.named_parameters():
        parameter.stop_gradient = name == frozen
    learner = full_model_learner(task_of(model, optimizer="AdamW"), Mesh.alone())
    inputs, targets = paddle.rand([6, 4]), paddle.to_tensor([0, 1, 1, 0, 1, 0])
    learner.train_batch(Batch((MicroBatch(inputs, targets, 6),), 6, 0, 0))
    return learner


class Arrays:
    """A checkpoint of these arrays, which records the parts that are read."""

    folder = Path("step-1")

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays, self.names, self.parts = arrays, tuple(arrays), {}

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def read(self, name: str, offset: Any, shape: Any) -> np.ndarray:
        self.parts[name] = tuple(offset), tuple(shape)
        return self.arrays[name][tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]


def saved(learner: Any) -> dict[str, np.ndarray]:
    named = learner.placed.named_parameters()
    return {name: tensor.numpy() for name, tensor in optimizer_tensors(learner.optimizer, named).items()}


def test_a_moment_is_sliced_as_its_weight_and_a_count_is_not() -> None:
    learner = trained()
    weight = dict(learner.placed.named_parameters())["weight"]
    learner.placed.placements.record(weight, shard=Shard(dim=0, rank=1, size=2))
    arrays = saved(learner)
    for name, array in arrays.items():
        if name.startswith("optimizer/weight/moment"):
            arrays[name] = np.concatenate([array + 1, array])
    checkpoint = Arrays(arrays)
    state._load_optimizer(checkpoint, learner)  # type: ignore[arg-type]
    assert checkpoint.parts["optimizer/weight/moment1"] == ((4, 0), (4, 2))
    assert checkpoint.parts["optimizer/weight/beta1_pow_acc"] == ((0,), (1,))
    assert checkpoint.parts["optimizer/bias/moment1"] == ((0,), (2,))


def test_a_state_of_another_width_is_refused_with_both_shapes() -> None:
    learner = trained()
    name = "optimizer/weight/moment1"
    checkpoint = Arrays({**saved(learner), name: np.zeros([4, 3], "float32")})
    with pytest.raises(
        CheckpointError, match=r"moment1 is \[4, 3\] in step-1 and \[4, 2\] in this model: .* another"
    ):
        state._load_optimizer(checkpoint, learner)  # type: ignore[arg-type]
    assert name not in checkpoint.parts


def test_a_parameter_that_is_frozen_at_a_resume_gets_no_state() -> None:
    checkpoint, learner = Arrays(saved(trained())), trained(frozen="bias")
    state._load_optimizer(checkpoint, learner)  # type: ignore[arg-type]
    assert sorted(checkpoint.parts) == sorted(saved(learner)) and len(checkpoint.parts) == 4
    assert all(name.startswith("optimizer/weight/") for name in checkpoint.parts)


def test_a_parameter_that_a_callback_has_frozen_keeps_its_state_in_a_rewind() -> None:
    learner = trained()
    checkpoint = Arrays(saved(learner))
    dict(learner.placed.named_parameters())["bias"].stop_gradient = True
    state._load_optimizer(checkpoint, learner)  # type: ignore[arg-type]
    assert set(checkpoint.parts) == set(checkpoint.names)
