"""A rank without memory says so, in one message, wherever Paddle's error was made."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_dp.errors import OutOfMemoryError
from tests.assembly.test_trainer import trainer


def test_a_backward_without_memory_says_size_phase_step_and_remedies() -> None:
    """It was «SystemError: <built-in function run_backward> returned a result with an exception set»."""

    def lack(*_: Any) -> None:
        raise MemoryError("(ResourceExhausted) Fail to alloc memory of 3200000000 size, error code is 12.")

    one = trainer()
    parameter: Any = next(p for p in one.learner.model.parameters() if not p.stop_gradient)
    assert isinstance(parameter, paddle.Tensor)
    parameter._register_backward_hook(lack)
    with pytest.raises(
        OutOfMemoryError,
        match=r"^out of memory: 3.2 GB could not be allocated in backward of step 1\. Rank 0 held parameters .*"
        r" on cpu; [^\n]* tensors\.\nTo reduce it: a larger train.micro_batches, strategy.recompute",
    ):
        one.fit("1 epoch")
