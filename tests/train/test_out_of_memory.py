"""A rank without memory says so, in one message, wherever Paddle's error was made."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from paddle_dp.core.memory_error import memory_error, unallocated
from paddle_dp.errors import OutOfMemoryError
from tests.assembly.test_trainer import trainer


def test_a_backward_without_memory_says_size_phase_step_and_remedies() -> None:
    """It was "SystemError: <built-in function run_backward> returned a result with an exception set"."""

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


def test_lack_of_memory_is_found_behind_the_error_that_a_backward_makes_of_it() -> None:
    text = "(ResourceExhausted) Fail to alloc memory of 3200000000 size, error code is 12.\n  [Hint: …]"
    lack, around = MemoryError(text), SystemError("<built-in function run_backward> returned a result …")
    around.__cause__ = lack
    assert memory_error(around) is lack and unallocated(lack) == "3.2 GB"
    assert memory_error(SystemError("…")) is memory_error(None) is None
    device = OSError("Out of memory error on GPU 0. Cannot allocate 1.5GB memory on GPU 0, 79GB …")
    assert memory_error(device) is device and unallocated(device) == "1.5 GB"
    small = RuntimeError("Out of memory error on sim:1. Cannot allocate 400.000000kB memory on sim:1")
    assert unallocated(small) == "400 kB"
    assert unallocated(MemoryError("Unable to allocate 2.98 GiB for an array")) == "2.98 GiB"
    assert unallocated(MemoryError()) == ""


def test_a_mistake_made_while_lack_of_memory_is_handled_is_a_mistake() -> None:
    """A model that catches a MemoryError and then fails otherwise has the other error as its cause."""
    mistake = AttributeError("no attribute 'spare'")
    mistake.__context__ = MemoryError()
    assert memory_error(mistake) is None
