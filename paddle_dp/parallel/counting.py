"""What a loss is over: totals and counts, so that one division by the global count makes the one-process mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import paddle

from paddle_dp.errors import LossError

Loss = Callable[[Any, Any], Any]


def total_and_count(result: Any, samples: int, counts: bool) -> tuple[paddle.Tensor, Any]:
    """A loss's answer as (total, count): it gives that pair, or a tensor of one loss per sample, shape [samples, …].

    `samples` is how many samples the micro holds, `counts` whether the loss has its own `count(targets)`.
    Raises LossError when the answer does not say what it is over: a bare mean cannot be averaged over unequal shares.
    """
    if isinstance(result, (tuple, list)) and len(result) == 2:
        total, count = result
    elif isinstance(result, paddle.Tensor) and result.ndim >= 1 and result.shape[0] == samples:
        total, count = result.sum(), result.size
    else:
        shape = list(result.shape) if isinstance(result, paddle.Tensor) else type(result).__name__
        raise LossError(
            f"the loss gave {shape}, which does not say what it is over. Return (total, count), the sum and how many "
            "it sums over, or one loss per sample: paddle.nn.CrossEntropyLoss(reduction='none'), for example."
        )
    if not counts and isinstance(count, int) and count != samples:
        raise LossError(
            f"the loss counts {count} things in {samples} samples. Give it a method count(targets), so that all ranks "
            "can agree on the number before they divide by it."
        )
    return total, count
