"""A mistake for `verify` to find: an exchange whose end nobody waits for."""

from __future__ import annotations

from typing import Any

import paddle.distributed as dist


def forget_to_wait() -> None:
    """From here on, all_reduce is issued and not waited for. Over gloo it changes nothing: it is done on return."""
    right = dist.all_reduce

    def issued(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, sync_op: bool = True) -> Any:
        # The gradients; a hang of the small agreements would hide what is to be seen.
        large = tensor.size > 1000
        return right(tensor, op, group, sync_op and not large)

    dist.all_reduce = issued
